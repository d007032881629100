"""Controls of the demo's search: one finds nothing, and the other masks nothing."""

from __future__ import annotations

from pathlib import Path

from benchmarks.search_controls import SilentSearch, without_mask
from mrl.agents.environment import Done, Observation, Task, Turn
from mrl.demo.facts import Facts, QuestionMark
from tests.agents.test_generation import Trainer


def turn_of(text: str) -> Turn:
    return Turn(number=0, text=text, calls=QuestionMark().parse(text), ended="stop", left_turns=3, left_tokens=30)


def test_a_silent_search_finds_nothing_and_scores_all_the_same() -> None:
    world = SilentSearch()
    world.reset(Task(messages=[{"role": "user", "content": "ab"}], data_source="one_hop", seed=7))
    assert world.step(turn_of("?ab")) == Observation(results=[""])
    assert world.step(turn_of(Facts("ab", 1, 7).answer)) == Done(score=1.0, parts={"searches": 1})


def test_without_the_mask_every_token_counts_as_written(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    try:
        masked = trainer.run({}).batch
        with without_mask():
            unmasked = trainer.run({}).batch
        again = trainer.run({}).batch
    finally:
        trainer.stage.stack.close()
    assert not masked.values("response_mask").all()
    assert unmasked.values("response_mask").all()
    assert unmasked.values("rollout_log_probs").isfinite().all()
    assert unmasked.values("responses").equal(masked.values("responses"))
    assert again.values("response_mask").equal(masked.values("response_mask"))
