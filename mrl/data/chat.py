"""Chat messages to token ids: a model's tokenizer, its chat template, and checks of the input text.

Text that users write must not contain the model's control tokens: a tokenizer reads `<|im_end|>` inside a message as
the end of that message, so its author could speak in another role. Such a row is refused. Encoding the text in pieces
instead would split it into tokens other than those the model knows, for every row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mrl import files
from mrl.config.data import DataConfig
from mrl.config.schema import RolloutConfig
from mrl.data.chat_template import ChatTemplate, TemplateFailure, chat_template
from mrl.errors import DataError, ModelError
from mrl.hub import check_files

_MEND = "correct the template, or set another one in data.template_file"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


class ChatTokenizer(Protocol):
    chat_template: Any
    eos_token_id: int | None
    added_tokens_decoder: Mapping[int, Any]
    special_tokens_map: Mapping[str, Any]

    def __call__(
        self,
        text: list[str],
        *,
        add_special_tokens: bool,
        return_offsets_mapping: bool = False,
        split_special_tokens: bool = False,
    ) -> Mapping[str, list[list[Any]]]: ...

    def __len__(self) -> int: ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def get_chat_template(self, chat_template: None, tools: Any) -> str: ...

    def decode(self, token_ids: list[int]) -> str: ...


def load_tokenizer(path: str, data: DataConfig | None = None, *, renders: bool = True) -> ChatTokenizer:
    """Load the tokenizer of a model directory, never from the network.

    A tokenizer that `renders` prompts has an end-of-sequence token and a chat template, its own or that of `data`.
    """
    _check_files(Path(path))
    from transformers import AutoTokenizer

    try:
        tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library that reads tokenizer.json raises no specific error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot load the tokenizer: {reason}", where=path) from error
    if data is not None and data.template_file is not None:
        tokenizer.chat_template = _read(data.template_file, "data.template_file")
    if renders:
        _check_tokenizer(tokenizer, path)
        _check_raw_text(tokenizer, path) if data is not None and data.raw_text else _check_template(tokenizer, path)
    return tokenizer


def compare_tokenizer(policy: ChatTokenizer, path: str) -> Iterator[str]:
    """Raise an error if the policy's token ids mean other tokens to a model. Warn if its chat template differs."""
    other = load_tokenizer(path, renders=False)
    if different := different_tokens(policy, other):
        raise DataError(
            different, where=path, fix="use a model with the policy's tokenizer, because it receives token ids"
        )
    if other.chat_template != policy.chat_template:
        yield f"{path} has another chat template than the policy, but reads prompts in the policy's template"


def different_tokens(policy: ChatTokenizer, other: ChatTokenizer) -> str:
    """Return how the policy's token ids differ in meaning for a model, or an empty string if they do not differ."""
    policy_vocab, other_vocab = policy.get_vocab(), other.get_vocab()
    different = [token for token, number in policy_vocab.items() if other_vocab.get(token) != number]
    if not different:
        return ""
    token = different[0]
    shown = f"{token!r} is {policy_vocab[token]} to the policy and {other_vocab.get(token, 'unknown')} here"
    return f"{len(different)} of the policy's {len(policy_vocab)} tokens have other ids or none: {shown}"


def control_tokens(tokenizer: ChatTokenizer, *more: str) -> re.Pattern[str]:
    """Return a pattern that finds the tokenizer's control tokens, and the texts in `more`."""
    control = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = sorted(control.union(more), key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in texts) or r"(?!)")


def template_options(data: DataConfig) -> dict[str, Any]:
    """Return the variables of the chat template, in addition to the messages."""
    if data.tools is None:
        return data.template
    try:
        tools = json.loads(_read(data.tools, "data.tools"))
    except ValueError as error:
        raise DataError(f"{data.tools} is not JSON: {error}", where="data.tools") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{data.tools} is not a list of tools", where="data.tools")
    return data.template | {"tools": tools}


def _read(file: str, key: str) -> str:
    try:
        return files.read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}", where=key) from error


def _check_files(directory: Path) -> None:
    """Raise an error with a clear message if the directory is wrong, before a library fails on it."""
    if not directory.is_dir():
        raise DataError("the directory does not exist", where=str(directory), fix="use a Hugging Face model directory")
    try:
        check_files(directory)
    except ModelError as error:
        raise DataError(error.what, where=error.where, fix=error.fix) from error
    present = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not present:
        raise DataError(
            f"the directory has no tokenizer ({', '.join(TOKENIZER_FILES)})",
            where=str(directory),
            fix="save the tokenizer in the model's directory",
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = _json(directory / name, {"model": None})
        if not isinstance(content, dict) or (name == "tokenizer.json" and "model" not in content):
            what = "not a tokenizer: it has no `model`"
            raise DataError(what, where=str(directory / name), fix="copy the file again")


def _json(file: Path, absent: Any) -> Any:
    """Return the contents of a file in the model's directory, or `absent` if it does not exist."""
    try:
        return json.loads(files.read_bytes(file)) if file.is_file() else absent
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=str(file), fix="copy the file again") from error


def _check_tokenizer(tokenizer: ChatTokenizer, path: str) -> None:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token", where=path, fix="set eos_token in its config")
    config = _json(Path(path, "config.json"), {})
    size = (config.get("text_config") or config).get("vocab_size")  # a model with vision has text in a section
    if isinstance(size, int) and len(tokenizer) > size:
        what = f"the tokenizer has {len(tokenizer)} tokens, but the model has embeddings for {size}"
        raise DataError(what, where=path, fix="use the model's own tokenizer, or enlarge its embeddings")


def _check_raw_text(tokenizer: ChatTokenizer, path: str) -> None:
    """Reject a tokenizer that appends an end token to every text: the model would continue after an end."""
    if tokenizer(["?"], add_special_tokens=True)["input_ids"][0][-1] == tokenizer.eos_token_id:
        raise DataError("the tokenizer appends its end token to every text", where=path, fix="add_eos_token: false")


def _check_template(tokenizer: ChatTokenizer, path: str) -> None:
    if not tokenizer.chat_template:
        fix = "set data.template_file or data.raw_text=true, or add a chat_template.jinja to the model's files"
        raise DataError("the tokenizer has no chat template", where=path, fix=fix)
    try:
        template_of(tokenizer, {}).render([{"role": "user", "content": "?"}], calls_for_answer=True)
    except TemplateFailure as error:
        # otherwise the template rejects only this conversation, and real prompts are checked row by row
        if error.is_broken:
            raise DataError(f"cannot render the chat template: {error}", where=path, fix=_MEND) from error


def template_of(tokenizer: ChatTokenizer, options: Mapping[str, Any]) -> ChatTemplate:
    """Return the template that transformers would choose, with the variables that it passes to every template."""
    template = tokenizer.get_chat_template(None, options.get("tools"))
    variables = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **options}
    return chat_template(template, json.dumps(variables, default=str))


def end_tokens(tokenizer: ChatTokenizer, model: str, rollout: RolloutConfig) -> dict[str, list[int]]:
    """Return the end tokens by their source. Each of them ends a response and belongs to it."""
    size, key = len(tokenizer.get_vocab()), "rollout.stop_token_ids"
    if beyond := [token for token in rollout.stop_token_ids if token >= size]:
        raise DataError(f"token {beyond[0]} does not exist: the tokenizer has {size} tokens", where=key)
    own = {key: sorted(rollout.stop_token_ids)} if rollout.stop_token_ids else {}
    return own if rollout.ignore_eos else own | model_end_tokens(tokenizer, model)


def model_end_tokens(tokenizer: ChatTokenizer, model: str) -> dict[str, list[int]]:
    """Return the end tokens of a model, by the file that defines them."""
    content = _json(Path(model, "generation_config.json"), {})
    listed = content.get("eos_token_id") if isinstance(content, dict) else None
    tokens_by_source = {
        "tokenizer": [tokenizer.eos_token_id],
        "generation_config.json": listed if isinstance(listed, list) else [listed],
    }
    ends = {
        name: sorted(token for token in tokens if isinstance(token, int)) for name, tokens in tokens_by_source.items()
    }
    return {name: tokens for name, tokens in ends.items() if tokens}
