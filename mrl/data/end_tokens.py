"""Which tokens end a response: those of the tokenizer, of the model's generation_config.json, and of the config."""

from __future__ import annotations

import json
from pathlib import Path

from mrl import files
from mrl.config.schema import RolloutConfig
from mrl.data.chat import ChatTokenizer
from mrl.errors import DataError


def end_tokens(tokenizer: ChatTokenizer, model: str, rollout: RolloutConfig) -> dict[str, list[int]]:
    """Return them by who says so. Any of them ends a response, which it belongs to."""
    size, key = len(tokenizer.get_vocab()), "rollout.stop_token_ids"
    if beyond := [token for token in rollout.stop_token_ids if token >= size]:
        raise DataError(f"there is no token {beyond[0]}: the tokenizer has {size}", where=key)
    own = {key: sorted(rollout.stop_token_ids)} if rollout.stop_token_ids else {}
    return own if rollout.ignore_eos else own | model_end_tokens(tokenizer, model)


def model_end_tokens(tokenizer: ChatTokenizer, model: str) -> dict[str, list[int]]:
    """Return those that a model brings, by the file that says so."""
    said = {
        "tokenizer": [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        "generation_config.json": _of_generation(Path(model, "generation_config.json")),
    }
    return {name: sorted(tokens) for name, tokens in said.items() if tokens}


def _of_generation(file: Path) -> list[int]:
    if not file.is_file():
        return []
    try:
        content = json.loads(files.read_bytes(file))
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=str(file), fix="copy the file again") from error
    given = content.get("eos_token_id") if isinstance(content, dict) else None
    return [token for token in (given if isinstance(given, list) else [given]) if isinstance(token, int)]
