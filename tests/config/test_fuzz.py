"""After small random damage, a configuration loads or raises ConfigError. No other error occurs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from mrl.config.resolved.load import load_config
from mrl.config.resolved.render import render
from mrl.errors import ConfigError
from tests.fuzzing import damaged, rounds

PIECES = [
    "{", "}", "[", "]", ":", " ", "\n", "\t", '"', "'", "#", "&a ", "*a", "!!", "|", ">", "%", "@", "---\n", "${", "\\",
    "null", "true", "-1", "1e400", "0x", ".nan", "???", "<<: ", "? ", "- ", "=", "\x00", "é", "\u2028", "10:30",
    "${oc.env:HOME}", "${run}", "${oc.decode:'['}", "extends: run.yaml\n", "9" * 5000,
]  # fmt: skip
OVERRIDES = [
    "actor",
    "actor.parallel.tp",
    "run.name",
    "placement.pools",
    "critic",
    "rollout.vllm",
    "",
    "a..b",
    "placement.roles.x",
]


def mutate(text: str, chance: random.Random) -> str:
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(4):
            case 0:
                text = text[:at] + chance.choice(PIECES) + text[at:]
            case 1:
                text = text[:at] + text[at + chance.randint(1, 12) :]
            case 2:
                lines = text.split("\n")
                chance.shuffle(lines)
                text = "\n".join(lines) if chance.random() < 0.2 else text
            case _:
                lines = text.split("\n")
                line = chance.randrange(len(lines))
                lines.insert(chance.randrange(len(lines)), lines[line])
                text = "\n".join(lines)
    return text


def test_damage_never_escapes(valid: str, write: Callable[..., str]) -> None:
    outcomes = {"loaded": 0, "refused": 0}
    for chance in rounds("config"):
        path = write(mutate(valid, chance).encode("utf-8", "surrogatepass"))
        overrides = [f"{chance.choice(OVERRIDES)}={chance.choice(PIECES)}"] if chance.random() < 0.4 else []
        try:
            render(load_config(path, overrides))
            outcomes["loaded"] += 1
        except ConfigError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 0.3 * outcomes["loaded"]


def test_damaged_bytes_never_escape(valid: str, write: Callable[..., str]) -> None:
    for chance in rounds("config bytes"):
        with contextlib.suppress(ConfigError):
            render(load_config(write(damaged(valid.encode(), chance)), []))
