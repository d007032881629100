"""From prompts to scored responses: generation in the engines, and rewards while others still generate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mrl.agents.conversation import Ids, WrittenTurn
from mrl.agents.figures import check_failed_share, dialog_metrics
from mrl.agents.loop import Dialog, Dialogs, Opening
from mrl.config.agent import AgentConfig
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer, end_tokens
from mrl.protocol import DataProto
from mrl.protocol.columns import Index, Jagged, from_rows
from mrl.rewards.manager import RewardManager
from mrl.rewards.outcome import Failure, Outcome, Score, reward_metrics, sum_of
from mrl.rewards.sample import Sample
from mrl.rollout.hybrid_engine import HybridEngine
from mrl.rollout.requests import GenerationRequest, Sampling, request_seed
from mrl.trainer.segments import segment_of


@dataclass(frozen=True)
class ScoredBatch:
    """Responses with their scores; samples without a score are gone from the batch and stand in the metrics."""

    batch: DataProto
    metrics: dict[str, float]


@dataclass(eq=False)
class Round:
    number: int
    """Of the step that it is for."""
    batch: DataProto
    """Of prompts, a row for each response."""
    dialogs: list[Dialog]
    sizes: Counter[str]
    """Uid -> its conversations that have not failed."""
    num_left: int
    """Conversations that go on."""
    samples: dict[int, Sample] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)
    """Row -> what names its sample where rewards are."""


class Generator:
    """Generates and scores. A response is a conversation with an environment; where there is none, of one turn."""

    def __init__(
        self,
        config: Config,
        hybrid: HybridEngine,
        rewards: RewardManager | None,
        tokenizer: ChatTokenizer,
        progress: Callable[[int, int], None],
        dialogs: Dialogs | None = None,
    ) -> None:
        """Make one that knows environments where it is given what speaks with them."""
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
        self.greedy = Sampling(1.0, 1.0, 1, *ends)
        self.validation = Sampling(validation.temperature, validation.top_p, validation.top_k, *ends)
        if validation.greedy:
            self.validation = self.greedy
        self._has_versions = config.asynchrony.ahead > 0
        functions = config.reward.functions.values()
        self._waits_for_groups = self.dialogs.has_environments and any(function.group for function in functions)
        """A group that loses a conversation is smaller, which is known at the end."""

    def run(self, batch: DataProto, sampling: Sampling, step: int) -> ScoredBatch:
        """One response to each row's prompt, with its score. Rows of one uid are its samples, in their order."""
        found = self.begin(batch, step)
        for done, dialog in enumerate(self._ended(sampling), start=1):
            self.progress(done, len(found.dialogs))
            self.add(found, dialog)
        return self.scored(found, self.rewards.drain() if self.rewards is not None else {})

    def begin(self, batch: DataProto, step: int) -> Round:
        dialogs = self.dialogs.begin(self._openings(batch, step))
        return Round(step, batch, dialogs, Counter(batch["uid"]), len(dialogs))

    def add(self, found: Round, dialog: Dialog) -> None:
        """Note that a conversation has ended, and have it scored."""
        row = dialog.opening.row
        found.num_left -= 1
        if dialog.failure is not None:
            found.sizes[dialog.opening.uid] -= 1
        else:
            found.samples[row] = self._sample(found.batch, dialog)
            if not self._waits_for_groups:
                self._submit(found, row)
        if not found.num_left:
            check_failed_share(self._config.agent, found.dialogs)
            if self._waits_for_groups:
                for each in sorted(found.samples):
                    self._submit(found, each)

    def _submit(self, found: Round, row: int) -> None:
        if self.rewards is not None:
            sample = found.samples[row]
            found.tickets[row] = self.rewards.submit(sample, found.sizes[sample.uid])

    def scored(self, found: Round, scored: Mapping[int, Outcome]) -> ScoredBatch:
        """Return the samples of a round that have a score, whose tickets name what was scored."""
        batch, dialogs, samples, tickets = found.batch, found.dialogs, found.samples, found.tickets
        outcomes = {row: self._outcome(dialogs[row], scored.get(tickets.get(row, 0))) for row in sorted(samples)}
        metrics = dialog_metrics(dialogs) if self.dialogs.has_environments else {}
        if self.rewards is not None or metrics:
            metrics |= reward_metrics([samples[row] for row in outcomes], list(outcomes.values()))
        scores = {row: outcome for row, outcome in outcomes.items() if isinstance(outcome, Score)}
        batch = self._with_prompts(batch, dialogs).take(list(scores))
        columns = self._columns(dialogs, samples, scores, batch.row_ids)
        return ScoredBatch(batch.union(columns), metrics)

    def _openings(self, batch: DataProto, step: int) -> list[Opening]:
        seen: dict[str, int] = {}
        openings = []
        rows = np.split(batch.values("prompts").numpy(), np.cumsum(batch.lengths("prompts"))[:-1])
        for row, (ids, uid) in enumerate(zip(rows, batch["uid"], strict=True)):
            number = seen[uid] = seen.get(uid, -1) + 1
            told = {"messages": batch["messages"][row]} if self.dialogs.has_environments else {}
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
                    **told,
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
            outcomes.append(self._of_environment(dialog, dialog.environment))
        if not outcomes:
            return Score(0.0, {}, 0.0)  # where only a reward model scores, later
        return sum_of(outcomes, self._config.reward.max_abs_score)

    def _of_environment(self, dialog: Dialog, name: str) -> Outcome:
        """Return what an environment gives: 0 where a limit ends the conversation before it gives anything.

        To leave such a conversation out would teach the model to come to no end.
        """
        score, config = dialog.score, self._config
        if score is None and not config.scoring_models() and not config.reward.scores(dialog.opening.data_source):
            if dialog.ended_conversation.ended == "done":
                what = f"neither the environment {name} nor a reward function has scored it"
                return Failure("bad_result", what, dialog.environment_s)
            score = 0.0
        parts = {} if score is None else {name: score}
        parts |= {f"{name}/{part}": number for part, number in dialog.parts.items()}
        value = config.agent.environments[name].weight * (score or 0.0)
        return Score(value, parts, dialog.environment_s)

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
        has_end = turn.finish == "stop" and int(ids[-1]) in self._end_tokens  # a text that ends it stays
        return self._tokenizer.decode((ids[:-1] if has_end else ids).tolist())

    def _with_prompts(self, batch: DataProto, dialogs: Sequence[Dialog]) -> DataProto:
        """Return the batch with what stood before the model's last segment in the place of the data's prompts."""
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
            "responses": from_rows([torch.tensor(each.response_ids) for each in conversations]),
            "rollout_log_probs": from_rows([torch.tensor(each.log_probs) for each in conversations]),
            "truncated": torch.tensor([each.ended == "length" for each in conversations]),
            "scores": torch.tensor([score.value for score in scores.values()], dtype=torch.float64),
        }
        if self._has_versions:
            tensors["versions"] = from_rows([torch.tensor(each.versions) for each in conversations])
        objects: dict[str, list[Any]] = {
            "response_text": [samples[row].response for row in scores],
            "answer": [score.answer for score in scores.values()],
        }
        if self.dialogs.has_environments:
            tensors["response_mask"] = from_rows([torch.tensor(each.mask) for each in conversations])
            objects["turns"] = [dialogs[row].said or [samples[row].response] for row in scores]
            objects["response_text"] = ["".join(turns) for turns in objects["turns"]]
            objects["ended"] = [each.ended for each in conversations]
            objects["other_segments"] = [list(map(segment_of, dialogs[row].other_segments)) for row in scores]
        return DataProto.from_dict(tensors=tensors, non_tensors=objects, row_ids=row_ids)


class OpenRounds:
    """The rounds under way, as what a fleet asks for follow-ups: turns of conversations, and what opens meanwhile.

    Each is whole when its last sample has its score, whatever the others do.
    """

    def __init__(
        self,
        generator: Generator,
        opening: Callable[[], Iterable[tuple[int, DataProto]]],
        whole: dict[int, ScoredBatch],
        *,
        stays_open: bool = False,
    ) -> None:
        """Ask `opening` for the numbers and rows of rounds that may begin, and put those that are `whole` there."""
        self._generator, self._opening, self._whole = generator, opening, whole
        self._rounds: list[Round] = []
        self._round_of: dict[Dialog, Round] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._later: Future[Any] = Future()  # never done: whether rounds open is looked at again and again
        self.stays_open = stays_open
        """Whether to wait for more rounds where none is under way."""

    def run(self) -> None:
        for _ in self.samples():
            pass

    def samples(self) -> Iterator[None]:
        """Generate until all rounds are whole, and it need not stay open; pause behind each sample.

        Whoever stops asking may go on with it later.
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
            found = self._generator.begin(rows, number)
            self._rounds.append(found)
            self._round_of |= dict.fromkeys(found.dialogs, found)
        requests = self._generator.dialogs.take()
        self._advance()
        return requests

    def arriving(self) -> Future[Any] | None:
        """Return what is done when there may be more; None where there cannot."""
        return self._generator.dialogs.arriving() or (self._later if self.stays_open else None)

    def _advance(self) -> None:
        """Have what has been written scored, and publish what is whole."""
        for dialog in self._generator.dialogs.ended():
            self._generator.add(self._round_of.pop(dialog), dialog)
        if self._generator.rewards is not None:
            self._outcomes |= self._generator.rewards.collect()
        self._publish_whole()

    def _publish_whole(self) -> None:
        for found in [each for each in self._rounds if self._is_whole(each)]:
            self._rounds.remove(found)
            scored = {ticket: self._outcomes.pop(ticket) for ticket in found.tickets.values()}
            if self._generator.rewards is not None:
                outcomes = ((found.samples[row], scored[ticket]) for row, ticket in found.tickets.items())
                failed = [(sample, outcome) for sample, outcome in outcomes if isinstance(outcome, Failure)]
                self._generator.rewards.check_share(failed, len(scored))
            self._whole[found.number] = self._generator.scored(found, scored)

    def _is_whole(self, found: Round) -> bool:
        return not found.num_left and all(ticket in self._outcomes for ticket in found.tickets.values())
