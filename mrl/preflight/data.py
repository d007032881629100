"""Checks of models and data: headers of the models' files, real rows through template and tokenizer, and correct
answers through the rewards."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mrl.config.arithmetic import rows_per_step
from mrl.config.data import SourceConfig
from mrl.config.resolved.load import AnyTyped, in_directories, model_names, rename_models
from mrl.config.reward import JUDGE, RewardConfig
from mrl.config.rules.reward_options import asks_own_engines
from mrl.config.schema import Config
from mrl.config.sft import AnyConfig, SftConfig
from mrl.data.chat import ChatTokenizer, end_tokens, load_tokenizer
from mrl.data.rlhf_dataset import Prompt, RLHFDataset, SkippedRow, open_dataset, open_sft_dataset
from mrl.data.rows import first_answer
from mrl.errors import BadRow, DataError, ModelError
from mrl.events import EventLog
from mrl.hub import is_offline, model_directory
from mrl.models.families import read_spec
from mrl.plan.known_models import model_spec
from mrl.plan.memory import gib
from mrl.preflight.agents import check_agents
from mrl.preflight.findings import CheckResult, Verdict, fail, guarded, ok, skip, warn
from mrl.preflight.teachers import check_teachers_prompts
from mrl.rewards.outcome import Failure, Outcome, Score
from mrl.rewards.sample import Sample
from mrl.trainer.checks import check_reference, check_reward_models, check_reward_sources, check_teachers
from mrl.trainer.components import check_model, manager_class, model_setup
from mrl.trainer.supervised_tasks import supervised_setup

_BYTES_PER_PARAMETER = 2  # published weights are bfloat16


def check_models(config: AnyTyped) -> Iterator[CheckResult]:
    """Check the files of each role's model as a run does before it requests a device. Only headers are read."""
    models = {role: config.model_of(role) for role in config.model_roles()}
    if isinstance(config, Config) and config.judge is not None:
        models[JUDGE] = "judge.path", config.judge.path
    for role, (key, name) in models.items():
        about = f"model of the {role}"
        try:
            directory = model_directory(name)
        except ModelError as error:
            yield _absent(about, name, error)
            continue
        if role == JUDGE:
            yield ok(about, f"{directory}: read by vLLM when the run starts")
        else:
            yield from guarded(about, _check(about, role, rename_models(config, {key: str(directory)}), directory))


def found_models(config: AnyConfig) -> Iterator[str]:
    """Yield the directories of the models on this machine. `check_models` reports the missing ones."""
    for name in dict.fromkeys(model_names(config).values()):
        with suppress(ModelError):
            yield str(model_directory(name))


def node_models(missing: Mapping[str, str]) -> Iterator[CheckResult]:
    for node, reason in missing.items():
        if reason:
            yield warn("models", f"node {node}: {reason}", "the run downloads them on that node, if it can")
    if not any(missing.values()):
        yield ok("models", "every node has the models of this machine")


def _check(about: str, role: str, config: AnyConfig, directory: Path) -> Iterator[CheckResult]:
    check_model(supervised_setup(config) if isinstance(config, SftConfig) else model_setup(role, config))
    files = list(directory.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    yield ok(about, f"{directory}: {read_spec(directory).family}, {len(files)} files of {gib(num_bytes)}")


def _absent(about: str, name: str, error: ModelError) -> CheckResult:
    what = f"{error.where}: {error.what}" if error.where else error.what
    if is_offline():
        return fail(about, what, error.fix)
    try:
        size = f"about {gib(model_spec(name).num_parameters * _BYTES_PER_PARAMETER)}"
    except ModelError:
        size = "of unknown size"
    return warn(about, f"{what}; `mrl train` downloads it, {size}", error.fix)


_MAX_ROWS = 256
_NUM_SCORED = 4
_MAX_NAMED = 3
_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<think>it is known</think> <answer>{}</answer>")
"""Forms that the built-in rewards look for. A custom reward usually expects one of them too."""


def check_data(config: AnyTyped, *, all_rows: bool) -> Iterator[CheckResult]:
    """Check tokenizer, sources and rewards. Without the tokenizer, skip everything else."""
    try:
        config = in_directories(config)
    except ModelError as error:
        yield skip("data", f"prompts and rewards need the models' tokenizers: {error.where or error.what}")
        return
    try:
        tokenizer = load_tokenizer(config.model.path, config.data)
    except DataError as error:
        yield fail("tokenizer", f"{error.where}: {error.what}", error.fix)
        yield skip("data", "prompts and rewards need the tokenizer")
        return
    form = "raw text" if config.data.raw_text else "chat template"
    yield ok("tokenizer", f"{len(tokenizer)} tokens, {form}")
    if isinstance(config, Config):
        yield from guarded("end tokens", _check_ends(config, tokenizer))
        paths = {role: model.path for role, model in config.scoring_models().items()}
        yield from guarded("reward_model", _check_tokens(check_reward_models(config, tokenizer), paths))
    if isinstance(config, Config) and config.reference is not None and config.reference.path is not None:
        of_reference = (("reference", warning) for warning in check_reference(config, tokenizer))
        yield from guarded("reference", _check_tokens(of_reference, {"reference": config.reference.path}))
    of_teachers: list[CheckResult] = []
    if isinstance(config, Config) and config.algorithm.distillation is not None:
        paths = {role: model.path for role, model in config.teaching_models().items()}
        of_teachers += guarded("teacher", _check_tokens(check_teachers(config, tokenizer), paths))
        yield from of_teachers
    scored: dict[str, list[Prompt]] = {}
    for key, source in config.data.sources():
        scored[key] = []
        yield from guarded(key, _check_source(config, {key: source}, tokenizer, all_rows, scored[key]))
    yield from guarded("data.train", _check_number(config, tokenizer))
    if isinstance(config, SftConfig):
        return
    if config.agent.environments:
        yield from guarded("agent", check_agents(config, scored, tokenizer))
    if config.algorithm.distillation is not None and all(result.verdict != "fail" for result in of_teachers):
        yield from guarded("teacher's prompts", check_teachers_prompts(config, tokenizer, scored))
    case = "a pattern must match the whole name; case matters"
    yield from guarded("rewards", (warn("rewards", warning, case) for warning in check_reward_sources(config)))
    if config.agent.environments:  # an environment may score rows that no function scores
        scored = {
            key: [prompt for prompt in prompts if config.reward.scores(prompt.row.data_source)]
            for key, prompts in scored.items()
        }
    for part, reward in (("train", config.reward), ("validation", config.validation_reward())):
        if part == "validation" and not reward.functions:
            continue  # same functions as training, already checked
        part_prompts = {key: prompts for key, prompts in scored.items() if key.startswith(f"data.{part}.")}
        others_score = bool(config.scoring_models() or config.agent.environments)
        yield from guarded("rewards", _check_rewards(reward, part_prompts, tokenizer, others_score))


def _check_ends(config: Config, tokenizer: ChatTokenizer) -> Iterator[CheckResult]:
    """Check which tokens end a response. If the sources disagree, show the source of each token."""
    sources = end_tokens(tokenizer, config.model.path, config.rollout)
    names: dict[int, list[str]] = {}
    for name, tokens in sources.items():
        for token in tokens:
            names.setdefault(token, []).append(name)
    ends = [
        f"{token} {tokenizer.decode([token])!r}" + (f" (only {' and '.join(by)})" if len(by) < len(sources) else "")
        for token, by in sorted(names.items())
    ]
    ends += [f"the text {text!r}" for text in config.rollout.stop]
    yield (
        ok("end tokens", ", ".join(ends)) if ends else warn("end tokens", "a response ends only at its maximum length")
    )


def _check_tokens(warnings: Iterable[tuple[str, str]], paths: Mapping[str, str]) -> Iterator[CheckResult]:
    """Yield, for each model that scores or teaches, whether it reads the policy's tokens."""
    problems = list(warnings)
    yield from (warn(role, warning) for role, warning in problems)
    warned = dict(problems)
    yield from (ok(role, f"{path} reads the policy's tokens") for role, path in paths.items() if role not in warned)


def _opened(config: AnyConfig, sources: Mapping[str, SourceConfig], tokenizer: ChatTokenizer) -> RLHFDataset:
    if isinstance(config, SftConfig):
        return open_sft_dataset(sources, config, tokenizer)
    return open_dataset(sources, config.data, config.rollout, tokenizer)


def _check_number(config: AnyConfig, tokenizer: ChatTokenizer) -> Iterator[CheckResult]:
    num, about = len(_opened(config, config.data.train, tokenizer)), "data.train"
    key, wanted = "rows_per_update", rows_per_step(config)
    if isinstance(config, Config):
        key, wanted = "prompts_per_step", config.batch.prompts_per_step
    if num < wanted:
        fix = f"add prompts, or batch.{key}={num}"
        yield fail(about, f"{num} prompts, but a step needs {wanted}", fix)
    else:
        yield ok(about, f"{num} prompts, {num / wanted:.1f} steps per epoch")


def _check_source(
    config: AnyConfig,
    source: Mapping[str, SourceConfig],
    tokenizer: ChatTokenizer,
    all_rows: bool,
    scored: list[Prompt],
) -> Iterator[CheckResult]:
    """Check the rows of one source. Append some of the usable rows to `scored`."""
    (key,) = source
    dataset = _opened(config, source, tokenizer)
    limits = config.batch if isinstance(config, SftConfig) else config.rollout
    rows = _rows(dataset, all_rows)
    prompts = [row for row in rows if isinstance(row, Prompt)]
    scored += prompts[:: max(1, len(prompts) // _NUM_SCORED)][:_NUM_SCORED]
    unusable = [row for row in rows if isinstance(row, SkippedRow)]
    seen = f"{len(dataset)} rows, {len(rows)} checked"
    if prompts:
        lengths = sorted(len(prompt.ids) for prompt in prompts)
        tail = lengths[int(0.95 * (len(lengths) - 1))]
        what = f"{seen}: prompts of {lengths[0]} to {lengths[-1]} tokens, 95 % within {tail}"
        yield ok(key, f"{what}; the limit is {limits.max_prompt_tokens}")
    else:
        yield fail(key, f"{seen}: no usable prompt", "see the lines below")
    if dropped := [row.num_tokens for row in unusable if row.error is None]:
        what = f"{len(dropped)} of {len(rows)} prompts are too long and will be dropped"
        longest = f"the longest has {max(dropped)} tokens"
        yield warn(key, f"{what}; {longest}", "raise max_prompt_tokens if they matter")
    errors = [row.error for row in unusable if row.error is not None]
    bad = [error for error in errors if isinstance(error, BadRow)]
    verdict: Verdict = "fail" if len(errors) > len(bad) or len(bad) > config.data.max_bad_rows else "warn"
    for error in errors[:_MAX_NAMED]:
        yield CheckResult(verdict, key, str(error).partition("\n")[0], error.fix)
    if len(errors) > _MAX_NAMED:
        yield CheckResult(verdict, key, f"{len(errors) - _MAX_NAMED} more rows with problems")


def _rows(dataset: RLHFDataset, all_rows: bool) -> list[Prompt | SkippedRow]:
    """Return rows at equal distances. With `all_rows`, also return all unusable rows, including duplicate ids."""
    bad = list(dataset.check()) if all_rows else []
    known, step = {unusable.draw.number for unusable in bad}, max(1, len(dataset) // _MAX_ROWS)
    some = dataset.read([draw for row in range(0, len(dataset), step) for draw in dataset.draws(row, row + 1)])
    return [*bad, *(row for row in some if row.draw.number not in known)]


def _check_rewards(
    config: RewardConfig, prompts: Mapping[str, list[Prompt]], tokenizer: ChatTokenizer, others_score: bool
) -> Iterator[CheckResult]:
    """Score correct answers in the workers that will score the responses. A sane reward is positive for some of
    them."""
    if not config.functions and prompts:
        yield skip("rewards", "there is no reward function: other components score, or only a teacher is used")
        return
    checked = {label: function for label, function in config.functions.items() if not asks_own_engines(function)}
    # so that all failures are shown
    reward = dataclasses.replace(config, functions=checked, on_failure="drop", max_failed_share=1.0)
    if absent := ", ".join(config.functions.keys() - checked.keys()):
        yield skip("rewards", f"{absent}: the judge's engines start with the run")
        prompts = {
            key: [prompt for prompt in rows if reward.scores(prompt.row.data_source)] for key, rows in prompts.items()
        }
    if not any(prompts.values()):
        return
    with tempfile.TemporaryDirectory() as directory:
        events = EventLog(Path(directory, "events.jsonl"))
        try:
            with manager_class(reward)(reward, events, others_score=others_score) as rewards:
                for key, rows in prompts.items():
                    if rows:
                        samples = [_answered(prompt, form, tokenizer) for form in _FORMS for prompt in rows]
                        yield _scores(key, rewards.score(samples), samples)
        finally:
            events.close()


def _answered(prompt: Prompt, form: str, tokenizer: ChatTokenizer) -> Sample:
    """Return a sample that answers with the ground truth in a given form, or with only the form if there is no ground
    truth."""
    row, response = prompt.row, form.format(first_answer(prompt.row.ground_truth))
    return Sample(
        prompt=prompt.text,
        response=response,
        num_response_tokens=len(tokenizer([response], add_special_tokens=False)["input_ids"][0]),
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        extra_info=row.extra_info,
        uid=prompt.draw.uid,
        row_id=prompt.draw.number,
    )


def _scores(key: str, outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> CheckResult:
    about = f"rewards of {key}"
    if failures := [outcome for outcome in outcomes if isinstance(outcome, Failure)]:
        what = f"{len(failures)} of {len(outcomes)} samples have no score: {failures[0].kind}: {failures[0].detail}"
        return fail(about, what, "correct the reward function")
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    num_rows = len(scores) // len(_FORMS)
    by_form = [scores[begin : begin + num_rows] for begin in range(0, len(scores), num_rows)]
    best = max(range(len(_FORMS)), key=lambda form: sum(score.value for score in by_form[form]))
    shown = ", ".join(f"{score.value:g}" for score in by_form[best])
    what = f"the correct answers, written as {samples[best * num_rows].response!r:.60}, score {shown}"
    if not any(score.value > 0 for score in by_form[best]):
        fix = "check the form that the function expects, and columns.ground_truth"
        return warn(about, f"{what}: none of them is rewarded", fix)
    slowest = max(score.seconds for score in scores)
    return ok(about, f"{what}; the slowest took {1000 * slowest:.0f} ms")
