"""How long a call may take, without a cluster: the clock and Ray are the test's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrl.controller import call
from mrl.controller.call import Call
from mrl.errors import WorkerSilent


def test_a_deadline_runs_from_the_call_whenever_its_answer_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], list[float]()

    def get(references: list[Any], timeout: float) -> None:
        waited.append(timeout)
        assert len(waited) < 10, "it never ends"
        now[0] += timeout
        raise call.GetTimeoutError  # Ray is imported by mrl alone, which asks it for tokens

    monkeypatch.setattr(call, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(call, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(Call, "_look", lambda *_: [])
    monkeypatch.setattr(Call, "_explain", lambda *_: WorkerSilent("no answer"))
    processes: Any = SimpleNamespace(deadlines=SimpleNamespace(heartbeat_s=5.0))
    asked = Call(processes, "update", {}, deadline_s=30.0)
    now[0] += 18.0  # other work meanwhile
    with pytest.raises(WorkerSilent):
        asked.wait()
    assert waited == [5.0, 5.0, 2.0], "twelve seconds were left"
