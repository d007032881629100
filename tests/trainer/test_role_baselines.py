"""Steps on conversations with roles: baselines of RAE and advantages by role, compared with loops over float64."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.agents.conversation import Conversation
from mrl.algos.role_baselines import RoleBaselines
from mrl.algos.rows import identity
from mrl.config.algorithm import AlgorithmConfig
from mrl.errors import AgentError
from mrl.protocol import DataProto
from mrl.protocol.columns import from_rows
from mrl.trainer.generation import ScoredBatch
from mrl.trainer.sample_stream import drawn_from_bytes, drawn_to_bytes
from mrl.trainer.segments import ComparedParts, role_metrics, segment_of, trained_rows, with_role_baselines
from mrl.workers.advantages import shard_advantages
from tests.trainer.fakes import Scene, make_config, scene

DECAY = 0.75
# Uid, source, roles of the segments in order (the last one wrote last), and a score for each role or one for all.
GAMES: list[tuple[str, str, str, dict[str, float] | float]] = [
    ("p0", "cards", "a b", {"a": 1.0, "b": -1.0}),
    ("p0", "cards", "a b a", {"a": -0.5, "b": 0.25}),
    ("p1", "cards", "b a", {"a": 0.5, "b": 2.0}),
    ("p1", "chess", "a", {"a": 3.0}),
    ("p1", "cards", "b b a b", {"a": 1.5, "b": -2.0}),
    ("p0", "cards", "a b", 0.125),
]


def conversation(number: int, place: int, role: str) -> Conversation:
    talk = Conversation(f"{number}.{place}", "p", np.array([5, place], np.int32), max_tokens=9, seed=0)
    talk.role = role
    talk.write(
        np.arange(1, 2 + (number + place) % 3, dtype=np.int32), np.full(1 + (number + place) % 3, -0.5), "stop", 1
    )
    if place % 2:
        talk.observe(np.array([9, 9], np.int32))
        talk.write(np.array([4], np.int32), np.array([-1.5], np.float32), "stop", 1)
    talk.end("done")
    return talk


def batch_of(games: list[Any]) -> DataProto:
    """Return the batch of these games, as generation does."""
    segments = [
        [conversation(number, place, role) for place, role in enumerate(game[2].split())]
        for number, game in enumerate(games)
    ]
    last = [of_game[-1] for of_game in segments]
    scores = [game[3][game[2].split()[0]] if isinstance(game[3], dict) else game[3] for game in games]
    return DataProto.from_dict(
        {
            "prompts": from_rows([torch.tensor(talk.prompt_ids) for talk in last]),
            "responses": from_rows([torch.tensor(talk.response_ids) for talk in last]),
            "rollout_log_probs": from_rows([torch.tensor(talk.log_probs) for talk in last]),
            "response_mask": from_rows([torch.tensor(talk.mask) for talk in last]),
            "scores": torch.tensor(scores, dtype=torch.float64),
            "truncated": torch.zeros(len(games), dtype=torch.bool),
        },
        {
            "uid": [game[0] for game in games],
            "data_source": [game[1] for game in games],
            "role": [talk.role for talk in last],
            "role_scores": [game[3] if isinstance(game[3], dict) else {} for game in games],
            "other_segments": [[segment_of(talk) for talk in of_game[:-1]] for of_game in segments],
            "prompt_text": ["" for _ in games],
            "response_text": ["" for _ in games],
        },
        row_ids=np.arange(len(games)) + 40,
    )


def plain_rows(games: list[Any]) -> list[tuple[int, str, float]]:
    """Return game, role and score of each trained row: last segments first, then the others."""
    scores = [[game[3][role] if isinstance(game[3], dict) else game[3] for role in game[2].split()] for game in games]
    of_games = [list(zip(game[2].split(), own, strict=True)) for game, own in zip(games, scores, strict=True)]
    rows = [(number, *of_game[-1]) for number, of_game in enumerate(of_games)]
    return rows + [(number, *row) for number, of_game in enumerate(of_games) for row in of_game[:-1]]


def minus_baselines(games: list[Any], baselines: dict[tuple[str, str], float]) -> list[float]:
    """Return R - b of each row, with b of its role and source after an update with R, once per game and role."""
    advantages: dict[tuple[int, str], float] = {}
    for number, (_, source, roles, score) in enumerate(games):
        for role in set(roles.split()):
            own = score[role] if isinstance(score, dict) else score
            baselines[source, role] = DECAY * baselines.get((source, role), 0.0) + (1 - DECAY) * own
            advantages[number, role] = own - baselines[source, role]
    return [advantages[number, role] for number, role, _ in plain_rows(games)]


def among_roles(games: list[Any]) -> list[float]:
    """Return GRPO's advantage of each row: a role counts once per game, among the same role of the same prompt."""
    rows = plain_rows(games)
    advantages = []
    for number, role, score in rows:
        uid = games[number][0]
        group = {game: other for game, name, other in rows if (games[game][0], name) == (uid, role)}
        spread = statistics.stdev(group.values()) if len(group) > 1 else 0.0
        advantages.append((score - statistics.fmean(group.values())) / (spread + 1e-6))
    return advantages


@contextmanager
def played(directory: Path, advantage: str, *steps: list[Any]) -> Iterator[Scene]:
    """A trainer whose steps learn from these games, with real advantages."""
    algorithm = AlgorithmConfig(advantage=advantage, rae_decay=DECAY)
    config = make_config(directory, algorithm=algorithm, training={"save_every": 1, "steps": len(steps)})
    with scene(config, directory) as found:
        actor: Any = found.components.actor
        found.components.stream.collector.collect = lambda step: ScoredBatch(batch_of(steps[step - 1]), {})
        actor.advantages = []

        def compute_advantages(batch: DataProto, whole: Any) -> tuple[DataProto, dict[str, float]]:
            advantages = shard_advantages(batch, whole, algorithm, identity, identity)
            masks = batch.columns()["response_mask"].rows()  # type: ignore[union-attr]
            actor.advantages.append(
                [(row, mask) for row, mask in zip(advantages["advantages"].rows(), masks, strict=True)]
            )
            return DataProto(advantages.columns(), advantages.row_ids, {}), dict(advantages.meta_info)

        actor.compute_advantages = compute_advantages
        yield found


def check(found: list[tuple[torch.Tensor, torch.Tensor]], expected: list[float]) -> None:
    """Compare the advantages of all tokens with a number per row; they are 0 on tokens that the model only read."""
    assert len(found) == len(expected)
    for (advantages, mask), value in zip(found, expected, strict=True):
        assert mask.any()
        assert advantages[mask].tolist() == pytest.approx([value] * int(mask.sum()), rel=1e-6, abs=1e-6)
        assert not advantages[~mask].any()


def test_rae_subtracts_the_moving_average_of_each_role_in_every_step(tmp_path: Path) -> None:
    second = [GAMES[4], GAMES[0], ("p7", "chess", "b a", {"a": -1.0, "b": 4.0}), GAMES[1]]
    baselines: dict[tuple[str, str], float] = {}
    with played(tmp_path, "rae", GAMES, second) as found:
        for step, games in enumerate((GAMES, second)):
            report = found.trainer.step()
            check(found.components.actor.advantages[step], minus_baselines(games, baselines))
            figures = {name: value for name, value in report.metrics.items() if name.startswith("rae/")}
            names = {f"rae/baseline/{source}/{role}": value for (source, role), value in baselines.items()}
            assert figures == pytest.approx(names)
        assert report.metrics["critic/score/mean"] == pytest.approx(np.mean([-2.0, 1.0, 4.0, -0.5])), (
            "of the first role"
        )
        assert report.metrics["batch/samples"] == 4


def test_a_resumed_run_continues_with_its_baselines(tmp_path: Path) -> None:
    baselines: dict[tuple[str, str], float] = {}
    expected = [minus_baselines(games, baselines) for games in (GAMES, GAMES[::-1])]
    with played(tmp_path, "rae", GAMES, GAMES[::-1]) as found:
        found.trainer.step()
        state = json.loads(json.dumps(found.components.state_dict()))
    (tmp_path / "other").mkdir()
    with played(tmp_path / "other", "rae", GAMES, GAMES[::-1]) as found:
        found.components.load_state_dict(state)
        found.trainer.num_steps_done = 1
        found.trainer.step()
        check(found.components.actor.advantages[0], expected[1])
        del state["role_baselines"]  # as in a checkpoint of an older version
        found.components.load_state_dict(state)
        assert found.components.role_baselines.figures() == {}


def test_grpo_compares_a_role_with_the_same_role_in_other_answers_to_the_prompt(tmp_path: Path) -> None:
    with played(tmp_path, "grpo", GAMES) as found:
        found.components.role_baselines.load_state_dict({"cards": {"a": 0.5}})  # of an earlier run with rae
        report = found.trainer.step()
        check(found.components.actor.advantages[0], among_roles(GAMES))
    assert not any(name.startswith("rae/") for name in report.metrics)


def test_reinforce_plus_plus_gives_each_row_the_score_of_its_role(tmp_path: Path) -> None:
    with played(tmp_path, "reinforce_plus_plus", GAMES) as found:
        found.trainer.step()
        rows = found.components.actor.advantages[0]
    scores = [score for _, _, score in plain_rows(GAMES)]
    tokens = [score for score, (_, mask) in zip(scores, rows, strict=True) for _ in range(int(mask.sum()))]
    mean, spread = statistics.fmean(tokens), (statistics.variance(tokens) + 1e-8) ** 0.5
    check(rows, [(score - mean) / spread for score in scores])


def test_rae_refuses_a_segment_without_a_role() -> None:
    batch = batch_of([("p0", "cards", "a", {"a": 1.0}), ("p1", "cards", "a", 0.5)])
    rows = trained_rows(batch.with_column("role", ["a", ""]))
    message = (
        r"1 of 2 rows have no role; first: a conversation of the prompt p1\n.* begin each segment with Start\(.*role="
    )
    baselines = RoleBaselines()
    with pytest.raises(AgentError, match=message):
        with_role_baselines(rows, baselines, DECAY)
    assert baselines.figures() == {}, "nothing was learned from a batch that is refused"
    without = DataProto({name: column for name, column in rows.columns().items() if name != "role"}, rows.row_ids, {})
    with pytest.raises(AgentError, match="2 of 2 rows have no role"):
        with_role_baselines(without, baselines, DECAY)


def test_roles_travel_with_batches_that_are_drawn_ahead() -> None:
    batch = batch_of(GAMES)
    drawn, _ = drawn_from_bytes(drawn_to_bytes({3: ScoredBatch(batch, {})}, 7))
    kept, rows = trained_rows(drawn[3].batch), trained_rows(batch)
    assert list(kept["role"]) == list(rows["role"]) == [role for _, role, _ in plain_rows(GAMES)]
    assert kept["scores"].tolist() == rows["scores"].tolist() == [score for _, _, score in plain_rows(GAMES)]
    assert ComparedParts.of(kept) == ComparedParts.of(rows)


def test_metrics_have_the_mean_score_of_each_role_once_per_game() -> None:
    figures = role_metrics(batch_of(GAMES))
    of_a, of_b = [1.0, -0.5, 0.5, 3.0, 1.5, 0.125], [-1.0, 0.25, 2.0, -2.0, 0.125]
    means = {"agent/role/a/score": statistics.fmean(of_a), "agent/role/b/score": statistics.fmean(of_b)}
    assert figures == pytest.approx(means)
