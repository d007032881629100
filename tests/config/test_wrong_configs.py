"""Wrong configurations, each with its exact messages."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import mrl
from mrl.config.resolved.load import load_config
from mrl.config.reward import BUILT_IN
from mrl.config.rules.reward_options import reward_functions
from mrl.errors import ConfigError

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("wrong_configs.yaml").read_text())
MODELS = {
    "short": {"num_hidden_layers": 6, "num_attention_heads": 12, "max_position_embeddings": 300},
    "model": {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 2},
    "moe": {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 12, "num_experts": 6},
    "windowed": {"num_hidden_layers": 6, "num_attention_heads": 12, "model_type": "mistral", "sliding_window": 4096},
}


def problems_of(path: str, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or [])
    assert caught.value.exit_code == 2
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def models(write: Callable[..., str]) -> None:
    for name, sizes in MODELS.items():
        write(json.dumps(sizes), f"{name}/config.json")
    write("{", "broken/config.json")
    Path("empty").mkdir()


def _needs(case: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """Mark cases about fields of Megatron or vLLM, which need these libraries."""
    return [pytest.mark.needs] if "the installed" in str(case["problems"]) or "Megatron" in case["case"] else []


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("case", [pytest.param(case, marks=_needs(case), id=case["case"]) for case in CASES])
def test_message(case: dict[str, Any], valid: str, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_TEST_EIGHT", "8")
    monkeypatch.delenv("MRL_TEST_NOT_SET", raising=False)
    text = valid
    for old, new in case.get("edits", {}).items():
        assert text.count(old) == 1, f"{old!r} must occur once in the valid configuration"
        text = text.replace(old, new)
    rewards = ", ".join(reward_functions())  # new names do not have to be added to these texts
    expected = [problem.replace("$PWD", str(Path.cwd())).replace("$REWARDS", rewards) for problem in case["problems"]]
    assert problems_of(write(text), case.get("overrides")) == expected


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        ("", ["run.yaml: the file is empty"]),
        ("- a\n- b\n", ["run.yaml:1: the file must hold keys and values (write `key: value` lines)"]),
        ("run: [1\nmodel: 2\n", ["run.yaml:2: not valid YAML: expected ',' or ']', but got ':'"]),
        ("run:\n\tname: x\n", ["run.yaml:2: not valid YAML: found character '\\t' that cannot start any token"]),
        ("a: 1\n---\nb: 2\n", ["run.yaml:2: not valid YAML: but found another document"]),
        (
            "run: {name: a}\nmodel: {}\nrun: {name: b}\nmodel: {}\n",
            [
                "run.yaml:3: run: the key occurs twice, first in line 1",
                "run.yaml:4: model: the key occurs twice, first in line 2",
            ],
        ),
        (
            "run: !!python/object/apply:os.system [ls]\nmodel: !mine x\n",
            [
                "run.yaml:1: run: the tag !!python/object/apply:os.system is not allowed (write plain values)",
                "run.yaml:2: model: the tag !mine is not allowed (write plain values)",
            ],
        ),
        ("1: x\n", ["run.yaml:1: a key must be text (put numbers and booleans in quotes)"]),
        ("1.5E+3: x", ["run.yaml:1: a key must be text (put numbers and booleans in quotes)"]),
        ("? [a, b]\n: x\n", ["run.yaml:1: a key must be text (put numbers and booleans in quotes)"]),
        (
            "run: &a {name: x}\nmodel:\n  <<: *a\n",
            ["run.yaml:3: model: merge keys (<<) are not supported (share values with `extends:` and another file)"],
        ),
        ("run: &a [*a, *a]\n", ["run.yaml:1: run: an alias that contains itself"]),
        ("run: " + "[" * 30 + "]" * 30, ["run.yaml:1: run: more than 20 levels deep"]),
        (
            "run: !!int x\n",
            ["run.yaml:1: not readable: a value that its tag does not allow, or a number of thousands of digits"],
        ),
        ("run: !!timestamp x\n", ["run.yaml:1: run: the tag !!timestamp is not allowed (write plain values)"]),
        (b"run:\n  name: \xff\n", ["run.yaml:2: not UTF-8 text (save the file as UTF-8)"]),
        ("a" * 2_000_000, ["run.yaml: cannot be read: has 2000000 bytes; at most 1048576 are read"]),
        ("a: " + "[" * 2_000, ["run.yaml:1: not readable: more than 20 levels deep"]),
        (
            "extends: 3\n",
            ["run.yaml:1: extends: must be the name of one file (to combine several files, let each extend the next)"],
        ),
        ("extends: run.yaml\n", ["run.yaml:1: extends: the chain of files is a cycle: run.yaml -> run.yaml"]),
        ("a: 1\nextends: bass.yaml\n", ['run.yaml:2: extends: "bass.yaml" does not exist (did you mean "base.yaml"?)']),
        (
            'extends: "a\\0.yaml"\n',
            ["run.yaml:1: extends: must be the name of one file (to combine several files, let each extend the next)"],
        ),
        ("extends: " + "x" * 300, [f'run.yaml:1: extends: "{"x" * 300}" does not exist']),
        ("extends: folder\n", ['run.yaml:1: extends: "folder" is a directory (name a file)']),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_unreadable_file(content: str | bytes, problems: list[str], write: Callable[..., str]) -> None:
    write("extends: folder/parent.yaml\n", "base.yaml")
    write("", "folder/parent.yaml")
    assert problems_of(write(content)) == problems


def test_alias_bomb_is_refused_in_bounded_time(write: Callable[..., str]) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (problem,) = problems_of(write("\n".join(levels)))
    assert "more than 10000 values, including those repeated by aliases" in problem


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "model.path=~no-such-user/model",
            "command line: model.path: $PWD/~no-such-user/model is not a directory, and "
            '"~no-such-user/model" is not a name on the hub (organization/name[@revision])',
        ),
        (
            "model.path=./" + "x" * 300,
            f'command line: model.path: $PWD/{"x" * 300} is not a directory, and "./{"x" * 300}" is not a name on the '
            "hub (organization/name[@revision])",
        ),
        ('run.dir="a\\0b"', 'command line: run.dir: must be one line of text, not "a\\u0000b"'),
    ],
    ids=lambda value: value[:30],
)
def test_hostile_override(override: str, problem: str, valid: str, write: Callable[..., str]) -> None:
    assert problems_of(write(valid), [override]) == [problem.replace("$PWD", str(Path.cwd()))]


def test_missing_file_names_a_near_one(write: Callable[..., str]) -> None:
    write("", "configs/laptop-ppo.yaml")
    assert problems_of("configs/laptop-pop.yaml") == [
        'configs/laptop-pop.yaml: does not exist (did you mean "configs/laptop-ppo.yaml"?)'
    ]
    assert problems_of("nowhere/x.yaml") == ["nowhere/x.yaml: does not exist"]


def test_directory_names_the_configuration_inside(write: Callable[..., str]) -> None:
    write("", "runs/demo/config.yaml")
    assert problems_of("runs/demo") == ['runs/demo: is a directory (did you mean "runs/demo/config.yaml"?)']
    assert problems_of("runs") == ["runs: is a directory (name a file)"]


def test_mistakes_of_file_and_command_line_come_together(valid: str, write: Callable[..., str]) -> None:
    path = write(valid.replace("device: cpu", "device: tpu").replace("prompts_per_step: 8", "prompts_per_step: x"))
    assert problems_of(
        path, ["actor.parallel.tpp=2", "+run.name=x", "run.dir=[]", "critic.max_tokens_per_device=0"]
    ) == [
        "command line: +run.name: an override takes no prefix (write run.name=value; run.name=null removes)",
        "command line: run.dir: must be text, not a list",
        'run.yaml:5: cluster.device: "tpu" is not one of cpu, gpu (did you mean "gpu"?)',
        'run.yaml:16: batch.prompts_per_step: must be a whole number, not "x"',
        'command line: actor.parallel.tpp: unknown key (did you mean "actor.parallel.tp"?)',
        "command line: critic.max_tokens_per_device: must be at least 1, not 0",
    ]


def test_unreadable_file_still_reports_the_command_line(write: Callable[..., str]) -> None:
    assert problems_of(write("run: ["), ["nonsense"]) == [
        "run.yaml:1: not valid YAML: expected the node content, but found '<stream end>'",
        'command line: "nonsense" is not an override (write key.path=value)',
    ]


def test_a_chain_of_many_files_ends(write: Callable[..., str]) -> None:
    for number in range(200):
        write(f"extends: c{number + 1}.yaml\n", f"c{number}.yaml")
    with pytest.raises(ConfigError, match=r"c49\.yaml:1: extends: the chain of files is longer than 50"):
        load_config("c0.yaml")


@pytest.mark.parametrize("name", [name for name in reward_functions() if name not in ("judge", "math_verify")])
def test_an_option_may_have_its_functions_own_default(name: str, valid: str, write: Callable[..., str]) -> None:
    """Every default of a function is a valid value of its option."""
    module = BUILT_IN[name].partition(":")[0].removeprefix("mrl.").replace(".", "/")
    tree = ast.parse((Path(mrl.__file__).parent / f"{module}.py").read_text())
    (own,) = (node for node in tree.body if isinstance(node, FUNCTIONS) and node.name == name)
    with_default = own.args.args[len(own.args.args) - len(own.args.defaults) :]
    defaults = zip(with_default, own.args.defaults, strict=True)
    options = {option.arg: ast.literal_eval(default) for option, default in defaults}
    required = {option: 64 for option, is_required in reward_functions()[name].items() if is_required}
    given = {**options, **required} | ({"target_tokens": 32} if name == "length" else {})
    given |= {"buffer_tokens": 32} if name == "overlong" else {"url": "http://host"} if name == "http" else {}
    load_config(write(valid), [f"reward.functions.own={json.dumps({'name': name, 'options': given})}"])
