"""The error text that reaches the driver when a worker's method raises; secrets are removed."""

from __future__ import annotations

import pytest

from mrl.controller.node_calls import RAISED
from mrl.controller.worker import Dispatch, MethodSpec
from mrl.controller.worker_host import RankFailed, WorkerHost
from mrl.errors import RewardError

SECRET = "hf_" + "a1B2" * 9


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError(f"401 for token {SECRET}"), "ValueError: 401 for token "),
        (RewardError(f"401 for token {SECRET}"), "401 for token "),
    ],
)
def test_a_failure_crosses_as_text_without_its_secrets(
    error: Exception, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    class Raises:
        def method(self) -> None:
            raise error

    host = WorkerHost()
    host._worker = Raises()  # type: ignore[assignment]
    with pytest.raises(RankFailed) as raised:
        host.call("method")
    failed = raised.value
    assert failed.kind == type(error).__name__
    assert failed.message.startswith(message)
    for text in (failed.message, failed.trace, *map(str, failed.args), capfd.readouterr().err):
        assert SECRET not in text
    assert "in method" in failed.trace


@pytest.mark.parametrize(("writes", "num_returned"), [((), 2), (("values",), 3)])
def test_an_error_has_as_many_returned_objects_as_an_answer(writes: tuple[str, ...], num_returned: int) -> None:
    """If the number differs, Ray raises an error about it, and the rank's own error is lost."""
    host = WorkerHost()
    host._methods = {"method": MethodSpec("method", Dispatch.DATA_PARALLEL, (), writes)}
    outcome, *others = host.call_for_node("method", True, ((), {}), [])
    assert outcome[0] == RAISED
    assert others == [None] * (num_returned - 1)
