"""Unknown names, and passed-on values of a wrong type, are configuration errors before a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config.libraries.installed import wrong_value
from mrl.config.resolved.load import load_config
from mrl.errors import ConfigError
from tests.apart import run_python

Write = Callable[..., str]
UNKNOWN = {
    "algorithm.advantage=gpro": 'unknown advantage estimator "gpro" (did you mean "grpo"?',
    "algorithm.loss.policy=gspo_token": 'unknown policy loss "gspo_token" (known: cispo, clip_cov, ',
    "algorithm.loss.aggregation=token_mean": 'unknown loss aggregation "token_mean" (did you mean "token-mean"?',
    "algorithm.kl.in_loss=k3++": 'unknown KL estimator "k3++" (did you mean "k3+"?',
    "algorithm.correction.level=tokens": 'unknown importance ratio level "tokens" (did you mean "token"?',
    "rollout.engine=hugging": 'unknown rollout engine "hugging" (known: sglang, transformers, vllm',
    "data.train.math.dataset=toy:adition": 'unknown toy task "adition" (did you mean "addition"?)',
    "cluster={device: gpu, devices_per_node: 4, hardware: h100-80}": '"h100-80" is not known (did you mean "h100-80gb"',
    "algorithm.advantage=own_parts:gpro": 'own_parts.py has no "gpro"; did you mean "grpo"?',
    "algorithm.advantage=own parts:grpo": '"own parts:grpo" is not of the form package.module:attribute',
    "algorithm.loss.policy='own_parts:'": '"own_parts:" is not of the form package.module:attribute',
    "algorithm.kl.in_loss=own_parts.deeper:k1": "",
    "reward.functions.answer.name=own_parts:scor": 'own_parts.py has no "scor"; did you mean "score"?',
    "reward.manager=own_parts:Managr": 'own_parts.py has no "Managr"',
    "actor.worker=own_parts:Worker": 'own_parts.py has no "Worker"',
    "training.metrics=['own_parts:score', 'own_parts:scores']": 'own_parts.py has no "scores"; did you mean "score"?',
    "training.trackers=[tensorbord]": 'unknown tracker "tensorbord" (did you mean "tensorboard"?',
    "training.trackers=['own_parts:Enginee']": 'own_parts.py has no "Enginee"; did you mean "Engine"?',
    "data.sampler=difficult": 'unknown sampler "difficult" (did you mean "difficulty"?',
    "reward.functions.answer.name=broken_parts:score": "broken_parts.py cannot be read as Python: invalid syntax",
    "algorithm.advantage=nowhere.at_all:grpo": "",
}
"""Problem of each override's key. Empty if the module is not on this machine, which only gives a warning."""
WRONG_TYPES = {
    "actor.optimizer.lr=fast": 'must be float or null, not "fast"',
    "actor.optimizer.clip_grad=true": "must be float, not true",
    "actor.optimizer.weight_decay=null": "must be float, not null",
    "actor.optimizer.lr=-1": "must be finite, and at least 0, not -1",
    "actor.optimizer.clip_grad=.inf": "must be finite, and at least 0, not inf",
    "actor.optimizer.adam_beta2=1.0": "must be from 0 to less than 1, not 1",
    "actor.ddp.bucket_size=many": 'must be int or null, not "many"',
    "actor.ddp.overlap_grad_reduce=1": "must be bool, not 1",
    "actor.megatron.recompute_granularity=all": 'must be full, selective or null, not "all"',
    "actor.megatron.recompute_modules=mlp": 'must be a list (list[str]) or null, not "mlp"',
    "actor.megatron.recompute_modules=[mlp, 7]": 'must be a list (list[str]) or null, not ["mlp", 7]',
    "critic.megatron.hidden_dropout=zero": 'must be float, not "zero"',
    "rollout.vllm.dtype=half": 'must be bfloat16, float16 or float32, not "half"',
    "rollout.vllm.dtype=3": "must be bfloat16, float16 or float32, not 3",
    "rollout.vllm.kv_cache_memory_bytes=64M": 'must be int or null, not "64M"',
    "rollout.vllm.max_num_seqs=2.5": "must be int or null, not 2.5",
    "rollout.vllm.kv_cache_dtype=fp7": 'not "fp7"',
    "rollout.vllm.cudagraph_capture_sizes=[1, two]": 'must be a list (list[int]) or null, not [1, "two"]',
    "rollout.vllm.max_lora_rank=7": "512, not 7",
    "rollout.vllm.hf_overrides=7": "",
}
"""The same for types and choices. Empty if only the library can check them."""


@pytest.fixture
def own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module that would never load. Its parts are found without importing it."""
    source = "raise SystemExit('imported')\nif True:\n    def grpo(): ...\nasync def score(): ...\nclass Engine: ...\n"
    (tmp_path / "own_parts.py").write_text(f"{source}loss, rows = 1, []\nfrom json import loads as k1\n")
    (tmp_path / "broken_parts.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def said_of(path: str, override: str) -> str:
    try:
        load_config(path, [override])
    except ConfigError as error:
        return "\n".join(map(str, error.problems))
    return ""


@pytest.mark.parametrize("override", UNKNOWN)
@pytest.mark.usefixtures("own_parts")
def test_a_name_that_nothing_goes_by(override: str, valid: str, write: Write) -> None:
    message = said_of(write(valid), override)
    assert UNKNOWN[override] in message
    assert bool(message) == bool(UNKNOWN[override])


@pytest.mark.parametrize("name", ["grpo", "k1", "Engine", "loss", "score"])
@pytest.mark.usefixtures("own_parts")
def test_what_a_module_defines_is_found_unloaded(name: str, valid: str, write: Write) -> None:
    resolved = load_config(write(valid), [f"algorithm.loss.policy=own_parts:{name}"])
    assert not any("own_parts" in warning for warning in resolved.warnings)


def test_a_module_that_is_not_here_is_warned_of(valid: str, write: Write) -> None:
    resolved = load_config(write(valid), ["algorithm.loss.policy=nowhere.at_all:loss"])
    assert 'algorithm.loss.policy: there is no module "nowhere.at_all" on this machine' in resolved.warnings


@pytest.mark.needs
@pytest.mark.parametrize("override", WRONG_TYPES)
def test_a_value_of_a_wrong_type(override: str, valid: str, write: Write) -> None:
    message = said_of(write(valid), override)
    assert WRONG_TYPES[override] in message
    assert bool(message) == bool(WRONG_TYPES[override])


def test_what_the_plan_reads_is_checked_without_the_libraries(valid: str, write: Write) -> None:
    code = (
        "import importlib.util, sys\n"
        "from mrl.config.resolved.load import load_config\n"
        "importlib.util.find_spec = lambda name: None\n"
        f"load_config({write(valid)!r}, sys.argv[1:])\n"
    )
    wrong = ["rollout.vllm.dtype=3", "actor.ddp.bucket_size=many", "rollout.vllm.max_num_seqs=few"]
    began = time.perf_counter()
    output = run_python("-c", code, *wrong, cwd=Path.cwd(), exit_code=1)
    assert "must be bfloat16, float16 or float32, not 3" in output
    assert 'actor.ddp.bucket_size: must be int or null, not "many"' in output
    assert 'rollout.vllm.max_num_seqs: must be int or null, not "few"' in output
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("int", [1], [True, 1.0, "1", None]),
        ("float", [1, 1.5], [True, "1.5"]),
        ("Optional[Union[str, List[int]]]", [None, "a", [1]], [2, ["a"]]),
        ("'int | None'", [None, 3], ["3"]),
        ("Literal['a', 2] | Other", ["a", 2, object()], []),
        ("Tuple[int, ...]", [[1, 2]], [["a"], (1,)]),
        ("dict[str, int]", [{}], [[]]),
        ("Word", ["in"], ["out", 1]),
        ("Callable[[int], str]", ["whatever"], []),
    ],
)
def test_annotations(annotation: str, good: list[object], bad: list[object]) -> None:
    def alias(name: str) -> str | None:
        return "Literal['in', 'on']" if name == "Word" else None

    assert [value for value in good if wrong_value(annotation, value, alias)] == []
    assert [value for value in bad if not wrong_value(annotation, value, alias)] == []
