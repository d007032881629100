"""Generation of scored responses from prompts: engines generate while the rewards of finished samples are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mrl.agents.conversation import Ids, WrittenTurn
from mrl.agents.figures import check_failed_share, dialog_metrics
from mrl.agents.loop import Dialog, Dialogs, Opening
from mrl.config.agent import AgentConfig
from mrl.config.algorithm import VECTOR_ADVANTAGES
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, end_tokens
from mrl.errors import AgentError
from mrl.protocol import DataProto
from mrl.protocol.columns import Index, Jagged, from_rows
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Failure, Outcome, Score, reward_columns, reward_metrics, sum_of
from mrl.rewards.sample import Sample
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.rollout.requests import GenerationRequest, Sampling, request_seed
from mrl.rollout.stored_routes import ROUTES, column_of
from mrl.trainer.segments import ROLE, ROLE_SCORES, role_metrics, segment_of


@dataclass(frozen=True)
class ScoredBatch:
    """Responses with their scores. Samples without a score are removed from the batch and counted in the metrics."""

    batch: DataProto
    metrics: dict[str, float]


@dataclass(eq=False)
class Round:
    number: int
    """Number of the step that uses the samples."""
    batch: DataProto
    """Prompts, one row for each response."""
    dialogs: list[Dialog]
    sizes: Counter[str]
    """Number of conversations per uid that have not failed."""
    num_left: int
    """Number of conversations that have not ended."""
    samples: dict[int, Sample] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)
    """Row -> ticket of the sample in the reward manager."""


class Generator:
    """Generates and scores responses. A response is a conversation with an environment, or one turn without one."""

    def __init__(
        self,
        config: Config,
        hybrid: HybridEngine,
        rewards: RewardManager | None,
        tokenizer: ChatTokenizer,
        progress: Callable[[int, int], None],
        dialogs: Dialogs | None = None,
    ) -> None:
        """Create a generator. Without `dialogs` it has no environments."""
        self._config = config
        self.hybrid = hybrid
        self.rewards = rewards
        self._tokenizer = tokenizer
        self.progress = progress
        self.dialogs = dialogs or Dialogs(AgentConfig(), None, {}, tokenizer.decode, lambda event: None)
        rollout, validation = config.rollout, config.validation
        self._end_tokens = {
            token for tokens in end_tokens(tokenizer, config.model.path, rollout).values() for token in tokens
        }
        self._end_tokens |= self.dialogs.end_ids
        ends = tuple(sorted(self._end_tokens)), tuple(rollout.stop), config.agent.deterministic
        self.training = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, *ends)
        self.training = replace(self.training, keeps_mask=config.algorithm.keep_sampling_mask)
        self.greedy = Sampling(1.0, 1.0, 1, *ends)
        self.validation = Sampling(validation.temperature, validation.top_p, validation.top_k, *ends)
        if validation.greedy:
            self.validation = self.greedy
        self._has_versions = config.asynchrony.ahead > 0
        functions = config.reward.functions.values()
        self._waits_for_groups = self.dialogs.has_environments and any(function.group for function in functions)
        """Whether scoring waits for the end of a group: failed conversations make groups smaller."""

    def run(self, batch: DataProto, sampling: Sampling, step: int) -> ScoredBatch:
        """Generate one response to each row's prompt, with its score. The rows of one uid are its samples, in order."""
        round_ = self.begin(batch, step)
        for done, dialog in enumerate(self._ended(sampling), start=1):
            self.progress(done, len(round_.dialogs))
            self.add(round_, dialog)
        return self.scored(round_, self.rewards.drain() if self.rewards is not None else {})

    def begin(self, batch: DataProto, step: int) -> Round:
        dialogs = self.dialogs.begin(self._openings(batch, step))
        return Round(step, batch, dialogs, Counter(batch["uid"]), len(dialogs))

    def add(self, round_: Round, dialog: Dialog) -> None:
        """Record the end of a conversation and submit its sample for scoring."""
        row = dialog.opening.row
        round_.num_left -= 1
        if dialog.failure is not None:
            round_.sizes[dialog.opening.uid] -= 1
        else:
            round_.samples[row] = self._sample(round_.batch, dialog)
            if not self._waits_for_groups:
                self._submit(round_, row)
        if not round_.num_left:
            check_failed_share(self._config.agent, round_.dialogs)
            if self._waits_for_groups:
                for ended_row in sorted(round_.samples):
                    self._submit(round_, ended_row)

    def _submit(self, round_: Round, row: int) -> None:
        if self.rewards is not None:
            sample = round_.samples[row]
            round_.tickets[row] = self.rewards.submit(sample, round_.sizes[sample.uid])

    def scored(self, round_: Round, scored: Mapping[int, Outcome]) -> ScoredBatch:
        """Return the samples of a round that have a score. `scored` has the outcome of each ticket."""
        batch, dialogs, samples, tickets = round_.batch, round_.dialogs, round_.samples, round_.tickets
        outcomes = {row: self._outcome(dialogs[row], scored.get(tickets.get(row, 0))) for row in sorted(samples)}
        metrics = dialog_metrics(dialogs) if self.dialogs.has_environments else {}
        if self.rewards is not None or metrics:
            metrics |= reward_metrics([samples[row] for row in outcomes], list(outcomes.values()))
        scores = {row: outcome for row, outcome in outcomes.items() if isinstance(outcome, Score)}
        batch = self._with_prompts(batch, dialogs).take(list(scores))
        batch = batch.union(self._columns(dialogs, samples, scores, batch.row_ids))
        return ScoredBatch(batch, metrics | (role_metrics(batch) if self.dialogs.has_environments else {}))

    def _openings(self, batch: DataProto, step: int) -> list[Opening]:
        seen: dict[str, int] = {}
        openings = []
        rows = np.split(batch.values("prompts").numpy(), np.cumsum(batch.lengths("prompts"))[:-1])
        for row, (ids, uid) in enumerate(zip(rows, batch["uid"], strict=True)):
            number = seen[uid] = seen.get(uid, -1) + 1
            messages = {"messages": batch["messages"][row]} if self.dialogs.has_environments else {}
            openings.append(
                Opening(
                    row=row,
                    key=f"{batch.row_ids[row]}",
                    uid=uid,
                    sample=number,
                    data_source=batch["data_source"][row],
                    prompt_ids=ids,
                    seed=request_seed(self._config.training.seed, step, uid, number),
                    max_tokens=self._config.rollout.max_response_tokens,
                    ground_truth=batch["ground_truth"][row],
                    extra_info=batch["extra_info"][row],
                    **messages,
                )
            )
        return openings

    def _ended(self, sampling: Sampling) -> Iterator[Dialog]:
        follow_ups = self.dialogs if self.dialogs.has_environments else None
        for generated in self.hybrid.generate(self.dialogs.take(), sampling, follow_ups):
            self.dialogs.written(generated)
            yield from self.dialogs.ended()
        yield from self.dialogs.ended()

    def _outcome(self, dialog: Dialog, scored: Outcome | None) -> Outcome:
        outcomes = [scored] if scored is not None else []
        if dialog.environment is not None:
            outcomes.append(self._environment_outcome(dialog, dialog.environment))
        if not outcomes:
            return Score(0.0, {}, 0.0)  # only a reward model scores, later
        return sum_of(outcomes, self._config.reward.max_abs_score)

    def _environment_outcome(self, dialog: Dialog, name: str) -> Outcome:
        """Return the outcome of the environment. Conversations that a limit ends before any score get 0.

        Removing them from the batch would teach the model to never finish.
        """
        score, config = dialog.score, self._config
        if score is None and not config.scoring_models() and not config.reward.scores(dialog.opening.data_source):
            if dialog.ended_conversation.ended == "done":
                problem = f"the environment {name} and the reward functions gave the conversation no score"
                return Failure("bad_result", problem, dialog.environment_s)
            score = 0.0
        parts = {} if score is None else {name: score}
        parts |= {f"{name}/{part}": number for part, number in dialog.parts.items()}
        value = config.agent.environments[name].weight * (score or 0.0)
        for role, own in self._role_scores(dialog).items():
            outcome = sum_of([Score(own, {}, dialog.environment_s)], config.reward.max_abs_score)
            if isinstance(outcome, Failure):
                return replace(outcome, detail=f"role {role}: {outcome.detail}")
        return Score(value, parts, dialog.environment_s)

    def _role_scores(self, dialog: Dialog) -> dict[str, float]:
        """Return the weighted score of each role, empty if roles have no separate scores. Raise an error if
        something else also scores, or reads the score of, a whole conversation."""
        if not dialog.scores:
            return {}
        config, name, source = self._config, dialog.environment or "", dialog.opening.data_source
        of_conversations = {
            f"the functions of reward for data source {source}": config.reward.scores(source),
            " and ".join(config.scoring_models()): bool(config.scoring_models()),
            "algorithm.overlong": config.algorithm.overlong is not None,
            "algorithm.dynamic_sampling": config.algorithm.dynamic_sampling is not None,
            f"algorithm.advantage={config.algorithm.advantage}": config.algorithm.advantage in ("remax", "gdpo"),
        }
        if named := ", ".join(what for what, is_set in of_conversations.items() if is_set):
            what = f"the environment {name} gives each role its own score, but a whole conversation has one score for"
            fix = "remove that part, or return Done(score=...), which all roles share"
            raise AgentError(f"{what} {named}", where=f"agent.environments.{name}", fix=fix)
        weight = config.agent.environments[name].weight
        return {role: weight * score for role, score in dialog.scores.items()}

    def _sample(self, batch: DataProto, dialog: Dialog) -> Sample:
        row = dialog.opening.row
        return Sample(
            prompt=dialog.prompt_text or batch["prompt_text"][row],
            response="\n".join(self._text(ids, turn) for ids, turn in dialog.written()),
            num_response_tokens=sum(int(segment.mask.sum()) for segment in dialog.segments),
            ground_truth=batch["ground_truth"][row],
            data_source=batch["data_source"][row],
            extra_info=batch["extra_info"][row],
            uid=batch["uid"][row],
            row_id=int(batch.row_ids[row]),
            turns=dialog.said,
        )

    def _text(self, ids: Ids, turn: WrittenTurn) -> str:
        has_end = turn.finish == "stop" and int(ids[-1]) in self._end_tokens  # stop texts stay in the response
        return self._tokenizer.decode((ids[:-1] if has_end else ids).tolist())

    def _with_prompts(self, batch: DataProto, dialogs: Sequence[Dialog]) -> DataProto:
        """Replace the prompts of the data with the text before the model's last segment."""
        if not self.dialogs.has_environments:
            return batch
        texts = {dialog.opening.row: dialog.prompt_text for dialog in dialogs if dialog.prompt_text is not None}
        prompts = [dialog.prompt_ids for dialog in dialogs]
        batch = batch.with_column("prompts", from_rows([torch.tensor(ids) for ids in prompts]))
        return batch.with_column("prompt_text", [texts.get(row, text) for row, text in enumerate(batch["prompt_text"])])

    def _columns(
        self, dialogs: Sequence[Dialog], samples: Mapping[int, Sample], scores: Mapping[int, Score], row_ids: Index
    ) -> DataProto:
        conversations = [dialogs[row].ended_conversation for row in scores]
        tensors: dict[str, torch.Tensor | Jagged] = {
            "responses": from_rows([torch.tensor(conversation.response_ids) for conversation in conversations]),
            "rollout_log_probs": from_rows([torch.tensor(conversation.log_probs) for conversation in conversations]),
            "truncated": torch.tensor([conversation.ended == "length" for conversation in conversations]),
            "scores": torch.tensor([score.value for score in scores.values()], dtype=torch.float64),
        }
        if self._config.algorithm.advantage in VECTOR_ADVANTAGES:
            parts = [score.parts for score in scores.values()]
            tensors |= {name: torch.tensor(values) for name, values in reward_columns(self._config.reward, parts)}
        if masks := [mask for conversation in conversations if (mask := conversation.sampling_mask) is not None]:
            tensors["sampling_mask"] = from_rows([torch.tensor(mask) for mask in masks])
        if self._has_versions:
            tensors["versions"] = from_rows([torch.tensor(conversation.versions) for conversation in conversations])
        objects: dict[str, list[Any]] = {
            "response_text": [samples[row].response for row in scores],
            "answer": [score.answer for score in scores.values()],
        }
        if self.dialogs.has_environments:
            tensors["response_mask"] = from_rows([torch.tensor(conversation.mask) for conversation in conversations])
            objects["turns"] = [dialogs[row].said or [samples[row].response] for row in scores]
            objects["response_text"] = ["".join(turns) for turns in objects["turns"]]
            objects["ended"] = [conversation.ended for conversation in conversations]
            objects[ROLE] = [conversation.role for conversation in conversations]
            objects[ROLE_SCORES] = [self._role_scores(dialogs[row]) for row in scores]
            objects["other_segments"] = [list(map(segment_of, dialogs[row].other_segments)) for row in scores]
        batch = DataProto.from_dict(tensors=tensors, non_tensors=objects, row_ids=row_ids)
        routes = [conversation.routes for conversation in conversations if conversation.routes is not None]
        return DataProto({**batch.columns(), ROUTES: column_of(routes)}, row_ids, {}) if routes else batch


class OpenRounds:
    """Rounds under way, in the form of the fleet's follow-ups: next turns of conversations, and newly opened rounds.

    A round is complete when its last sample has its score, independent of other rounds.
    """

    def __init__(
        self,
        generator: Generator,
        opening: Callable[[], Iterable[tuple[int, DataProto]]],
        whole: dict[int, ScoredBatch],
        *,
        stays_open: bool = False,
    ) -> None:
        """Create the rounds.

        `opening` returns the number and rows of rounds that may begin; complete ones go to `whole`.
        """
        self._generator, self._opening, self._whole = generator, opening, whole
        self._rounds: list[Round] = []
        self._round_of: dict[Dialog, Round] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._later: Future[Any] = Future()  # never done: the fleet polls for new rounds
        self.stays_open = stays_open
        """Whether to wait for more rounds when no round is under way."""

    def run(self) -> None:
        for _ in self.samples():
            pass

    def samples(self) -> Iterator[None]:
        """Generate until all rounds are complete and no more may open. Pause after each sample.

        The caller may stop iterating and continue later.
        """
        generator = self._generator
        for generated in generator.hybrid.generate((), generator.training, self, in_flight=True):
            generator.dialogs.written(generated)
            self._advance()
            yield
        self._advance()
        if self._rounds and generator.rewards is not None:
            self._outcomes |= generator.rewards.drain()
            self._publish_whole()

    def take(self) -> Sequence[GenerationRequest]:
        for number, rows in self._opening():
            round_ = self._generator.begin(rows, number)
            self._rounds.append(round_)
            self._round_of |= dict.fromkeys(round_.dialogs, round_)
        requests = self._generator.dialogs.take()
        self._advance()
        return requests

    def arriving(self) -> Future[Any] | None:
        """Return a future that is done when there may be more requests; None if no more can come."""
        return self._generator.dialogs.arriving() or (self._later if self.stays_open else None)

    def _advance(self) -> None:
        """Submit finished conversations for scoring, and publish complete rounds."""
        for dialog in self._generator.dialogs.ended():
            self._generator.add(self._round_of.pop(dialog), dialog)
        if self._generator.rewards is not None:
            self._outcomes |= self._generator.rewards.collect()
        self._publish_whole()

    def _publish_whole(self) -> None:
        for round_ in [candidate for candidate in self._rounds if self._is_whole(candidate)]:
            self._rounds.remove(round_)
            scored = {ticket: self._outcomes.pop(ticket) for ticket in round_.tickets.values()}
            if self._generator.rewards is not None:
                outcomes = ((round_.samples[row], scored[ticket]) for row, ticket in round_.tickets.items())
                failed = [(sample, outcome) for sample, outcome in outcomes if isinstance(outcome, Failure)]
                self._generator.rewards.check_share(failed, len(scored))
            self._whole[round_.number] = self._generator.scored(round_, scored)

    def _is_whole(self, round_: Round) -> bool:
        return not round_.num_left and all(ticket in self._outcomes for ticket in round_.tickets.values())
