"""Checks of what teachers read of real rows: prompts with a context, and texts in another tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mrl.config.role_kinds import teacher_of
from mrl.config.schema import Config
from mrl.data.chat import ChatTokenizer
from mrl.data.rlhf_dataset import Prompt, to_batch
from mrl.data.teacher_context import Untaught, teacher_context
from mrl.data.teacher_text import Read, aligned_sizes, response_aligners
from mrl.preflight.findings import CheckResult, ok, warn

Prompts = Mapping[str, Sequence[Prompt]]


def check_teachers_prompts(config: Config, tokenizer: ChatTokenizer, scored: Prompts) -> Iterator[CheckResult]:
    """Write the prompts that teachers would read for these rows, in their tokens."""
    context, aligners = teacher_context(config, tokenizer), response_aligners(config, tokenizer)
    for key, prompts in scored.items():
        if context is not None and prompts:
            lengths = [len(ids) for ids in context.prompts_of_rows(to_batch(prompts))]
            of = " without {success}" if context.shows_success else ""
            yield ok(f"teacher's prompts of {key}", f"{len(lengths)} rows, at most {max(lengths)} tokens{of}")
        for role, aligner in aligners.items():
            if own := [prompt for prompt in prompts if teacher_of(config, prompt.row.data_source) == role]:
                texts = [prompt.row.messages[-1]["content"] for prompt in own]
                read = [aligner.align(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
                prompt = max(len(aligner.encoder.prompt(of_role.row.messages)) for of_role in own)
                yield from _check_aligned(config, role, read, prompt, f"{role}'s tokens of {key}")


def _check_aligned(config: Config, role: str, read: Read, prompt: int, about: str) -> Iterator[CheckResult]:
    """Write what a teacher reads of texts, as if they were responses. Its longest prompt has this many tokens."""
    if lost := Counter(said.value for said in read if isinstance(said, Untaught)):
        listed = ", ".join(f"{reason} {num}" for reason, num in lost.items())
        what = f"{lost.total()} of {len(read)} texts cannot be aligned: {listed}"
        yield warn(about, what, "such responses have no teacher; teacher/untaught/... counts them by reason")
    if not (sizes := aligned_sizes(read)):
        return
    longest = prompt + round(sizes["tokens_per_token"] * config.rollout.max_response_tokens)
    per_token = f"{sizes['tokens_per_token']:.2f} tokens and {sizes['spans_per_token']:.2f} spans"
    what = f"the teacher reads {per_token} for each token of the policy, and at most {prompt} tokens of a prompt"
    model = config.model_roles()[role]
    if longest > (room := model.max_tokens_per_device * model.parallel.cp):
        what += f"; the longest sample has about {longest}, and {room} fit, so it has no teacher"
        yield warn(about, what, f"{role}.max_tokens_per_device={-(-longest // model.parallel.cp)}")
    else:
        yield ok(about, what)
