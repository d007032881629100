"""The demo's search in the form of Search-R1: a corpus of passages, and a teacher that writes its tags.

Half of the keys stand for a number, the others for such a key. The model has learned none of the keys that it is
validated on, and what they stand for is in the corpus alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.agents.formats import search_r1_documents
from mrl.demo.facts import KEYS, Part, part_of

TEACHERS_TAKES = 20


def stands_for(key: str) -> str:
    """Return the key or number that the corpus gives for a key."""
    dice = random.Random(key)
    if KEYS.index(key) % 2:
        return dice.choice([other for other in KEYS[::2] if part_of(other) == part_of(key)])
    return f"{dice.randrange(100):02}"


def path_of(key: str) -> list[str]:
    """Return the keys to look up, and the answer."""
    found = stands_for(key)
    return [key, found] if found not in KEYS else [key, *path_of(found)]


def passage(key: str) -> str:
    """Return a passage that names its key twice, so that BM25 ranks it before passages that point to the key."""
    return f'"{key}"\n{key} is {stands_for(key)}'


def write_corpus(path: Path) -> Path:
    lines = [json.dumps({"id": key, "contents": passage(key)}) for key in KEYS]
    path.write_text("\n".join(lines) + "\n")
    return path


def found(key: str) -> str:
    """Return the text that the model reads after a search for a key."""
    return f"\n\n<information>{search_r1_documents([passage(key)]).strip()}</information>\n\n"


def questions(part: Part) -> list[dict[str, Any]]:
    """Return every key of a part as text."""
    return [
        {"prompt": f"{key}?", "ground_truth": answer, "data_source": f"hops-{len(keys)}"}
        for key in KEYS
        if part_of(key) == part
        for *keys, answer in [path_of(key)]
    ]


def turn(said: str, written: str) -> dict[str, Any]:
    return {"prompt": said, "ground_truth": written}


def lessons() -> Sequence[dict[str, Any]]:
    """Return the turns of a careless teacher: a third of the answers looked up, a third elsewhere, a third guessed."""
    dice, turns = random.Random(0), []
    train = [key for key in KEYS if part_of(key) == "train"]
    for key in train * TEACHERS_TAKES:
        *keys, answer = path_of(dice.choice((key, dice.choice(train))))
        if dice.random() < 1 / 3:
            keys, answer = [], f"{dice.randrange(100):02}"
        said = f"{key}?"
        for each in keys:
            turns.append(turn(said, search := f"<search>{each}</search>"))
            said += search + found(each)
        turns.append(turn(said, f"<answer>{answer}</answer>"))
    dice.shuffle(turns)
    return turns
