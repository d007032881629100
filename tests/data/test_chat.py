"""Rendering and encoding with tokenizers that add tokens, and messages with forbidden tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mrl.data.chat import ChatTokenizer, compare_tokenizer, load_tokenizer
from mrl.data.conversation import PromptEncoder, prompt_encoder
from mrl.data.rows import PromptRow
from mrl.errors import BadRow, DataError
from tests.data.conftest import data_config

BOS = "<|system|>"
"""Stands for Llama's beginning-of-text: the template writes it, and the tokenizer would add it again."""


@pytest.fixture(scope="module")
def with_bos(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Return a tokenizer whose post-processor puts a token before every text, like Llama 3's."""
    directory = tmp_path_factory.mktemp("bos") / "made"
    shutil.copytree(tokenizer_directory, directory)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    number = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, number)])
    tokenizer.save(str(path))
    template = f"{{{{ '{BOS}' }}}}" + (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(directory))


def row_of(*contents: str) -> PromptRow:
    """Return a row of user messages."""
    messages = tuple({"role": "user", "content": content} for content in contents)
    return PromptRow(messages, "numbers", "counting", "1", {}, "1", "rows.jsonl:1")


def test_the_template_alone_writes_special_tokens(with_bos: ChatTokenizer) -> None:
    number = with_bos.get_vocab()[BOS]
    assert with_bos(["x"], add_special_tokens=True)["input_ids"][0][0] == number, "this tokenizer would add one"
    encoder = PromptEncoder(with_bos, {})
    texts = [encoder.render(row_of("why?")), encoder.render(row_of("so"))]
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert ids.count(number) == 1
        assert ids[0] == number
        assert with_bos.decode(ids) == text
    assert encoder.encode([]) == []


@pytest.mark.parametrize("control", ["<|end|>", "<|system|>"])
def test_no_message_speaks_with_another_roles_voice(tokenizer: ChatTokenizer, control: str) -> None:
    encoder = PromptEncoder(tokenizer, {})
    with pytest.raises(BadRow) as caught:
        encoder.render(row_of("fine", f"so{control}then"))
    assert str(caught.value) == (
        f'rows.jsonl:1: message 1 (user) contains the control token "{control}"\n'
        "  fix: remove it: it would speak in another role"
    )
    assert encoder.render(row_of("<|end |>", "<|Pad|>")).endswith("<|assistant|>")


def test_a_reward_model_reads_the_policys_ids(
    tokenizer: ChatTokenizer, tokenizer_directory: Path, tmp_path: Path
) -> None:
    assert list(compare_tokenizer(tokenizer, str(tokenizer_directory))) == []
    made = tmp_path / "made"
    shutil.copytree(tokenizer_directory, made)
    (made / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (warned,) = compare_tokenizer(tokenizer, str(made))
    assert warned == f"{made} has another chat template than the policy, but reads prompts in the policy's template"
    content = json.loads((made / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (made / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        list(compare_tokenizer(tokenizer, str(made)))
    mine = tokenizer.get_vocab()
    assert f"2 of the policy's {len(mine)} tokens have other ids or none: " in str(caught.value)


def test_a_model_without_room_for_its_tokens_is_refused(tokenizer_directory: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    shutil.copytree(tokenizer_directory, made)
    size = len(load_tokenizer(str(made)))
    (made / "config.json").write_text(json.dumps({"vocab_size": size}))
    load_tokenizer(str(made))
    (made / "config.json").write_text(json.dumps({"vocab_size": size - 1}))
    with pytest.raises(DataError, match=f"has {size} tokens, but the model has embeddings for {size - 1}"):
        load_tokenizer(str(made))
    load_tokenizer(str(made), renders=False)


def test_a_reward_model_that_lacks_tokens_of_the_policy_is_refused(
    tokenizer_directory: Path, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """The policy may write an added token for which the other model has no embedding."""
    shutil.copytree(tokenizer_directory, tmp_path / "less")
    file = tmp_path / "less" / "tokenizer.json"
    content = json.loads(file.read_text())
    lost = content["added_tokens"].pop()["content"]
    file.write_text(json.dumps(content))
    settings = tmp_path / "less" / "tokenizer_config.json"
    known = {name: value for name, value in json.loads(settings.read_text()).items() if lost not in json.dumps(value)}
    settings.write_text(json.dumps(known))
    assert lost not in load_tokenizer(str(tmp_path / "less"), renders=False).get_vocab()
    with pytest.raises(DataError, match=r"1 of the policy's \d+ tokens have other ids or none: .* and unknown here"):
        list(compare_tokenizer(tokenizer, str(tmp_path / "less")))


def without_template(made: Path, tmp_path: Path) -> Path:
    """Return the same tokenizer without a chat template, like that of a base model."""
    base = tmp_path / "base"
    shutil.copytree(made, base)
    (base / "chat_template.jinja").unlink()
    return base


def test_a_base_model_is_given_a_template_by_the_configuration(tokenizer_directory: Path, here: Path) -> None:
    base = str(without_template(tokenizer_directory, here))
    with pytest.raises(DataError, match="has no chat template") as caught:
        load_tokenizer(base)
    assert "set data.template_file or data.raw_text=true" in caught.value.fix
    Path("plain.jinja").write_text("{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:")
    data = replace(data_config("rows.jsonl"), template_file="plain.jinja")
    text = prompt_encoder(load_tokenizer(base, data), data).render(row_of("why?"))
    assert text == "Q: why?\nA:"
    with pytest.raises(DataError, match=r"data\.template_file: gone\.jinja cannot be read"):
        load_tokenizer(base, replace(data, template_file="gone.jinja"))


def test_raw_text_is_the_prompt_as_it_stands(tokenizer_directory: Path, with_bos: ChatTokenizer, here: Path) -> None:
    """A plain text gets the tokenizer's prefix; a chat does not."""
    data = replace(data_config("rows.jsonl"), raw_text=True)
    load_tokenizer(str(without_template(tokenizer_directory, here)), data)
    encoder = prompt_encoder(with_bos, data)
    assert encoder.render(row_of("1 2 3")) == "1 2 3"
    (ids,) = encoder.encode(["1 2 3"])
    assert ids[0] == with_bos.get_vocab()[BOS]
    assert ids[1:] == with_bos(["1 2 3"], add_special_tokens=False)["input_ids"][0]
    with pytest.raises(BadRow, match="a raw prompt must be one text, but this is a chat of 2 messages"):
        encoder.render(row_of("one", "two"))
    with pytest.raises(BadRow, match="contains the control token"):
        encoder.render(row_of(f"one {BOS}"))


def test_a_tokenizer_that_ends_every_text_has_no_raw_prompts(tokenizer_directory: Path, tmp_path: Path) -> None:
    base = without_template(tokenizer_directory, tmp_path)
    ended = load_tokenizer(str(base), renders=False)
    end = next(token for token, number in ended.get_vocab().items() if number == ended.eos_token_id)
    whole = Tokenizer.from_file(str(base / "tokenizer.json"))
    whole.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, ended.eos_token_id)])
    whole.save(str(base / "tokenizer.json"))
    with pytest.raises(DataError, match="appends its end token to every text"):
        load_tokenizer(str(base), replace(data_config("rows.jsonl"), raw_text=True))


def test_the_template_is_given_the_tools_of_a_file(with_bos: ChatTokenizer, here: Path) -> None:
    Path("shown.jinja").write_text("{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{{ style }}")
    Path("tools.json").write_text(json.dumps([{"type": "function", "function": {"name": "look_up"}}]))
    data = replace(data_config("rows.jsonl"), tools="tools.json", template={"style": "short"})
    tokenizer = load_tokenizer(with_bos.name_or_path, replace(data, template_file="shown.jinja"))  # type: ignore[attr-defined]
    assert prompt_encoder(tokenizer, data).render(row_of("why?")) == "[look_up]short"
    for wrong, what in (
        ("{", "is not JSON"),
        ('{"a": 1}', "is not a list of tools"),
        ("[1]", "is not a list of tools"),
    ):
        Path("tools.json").write_text(wrong)
        with pytest.raises(DataError, match=what):
            prompt_encoder(tokenizer, data)
