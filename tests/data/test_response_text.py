"""A policy's responses in the tokens of another model: equal to the tokens that `mrl rm` trains on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mrl.config.data import DataConfig
from mrl.data.chat import load_tokenizer
from mrl.data.conversation import PromptEncoder, ResponseEncoder
from mrl.data.rows import PromptRow
from mrl.demo.model import save_toy_tokenizer
from mrl.errors import BadRow

BEGIN, TURN, END = "<s>", "<turn>", "</turn>"
TEMPLATE = (
    f"{BEGIN}{{%- for m in messages %}}{{{{ '{TURN}' + m['role'] + ':' + m['content'] | trim + '{END}\\n' }}}}"
    f"{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{ '{TURN}assistant:' }}}}{{%- endif %}}"
)
DATA = DataConfig(train={})
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two  words?"}]


def other_tokenizer(path: Path) -> Path:
    """A vocabulary in another order with some pairs. Both template and tokenizer write the prefix of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocab = {symbol: number for number, symbol in enumerate([*alphabet, "wo", "ss"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("w", "o"), ("s", "s")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token="</s>",
        additional_special_tokens=[TURN, END],
        clean_up_tokenization_spaces=False,
    )
    begin = made.convert_tokens_to_ids(BEGIN)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(other_tokenizer(tmp_path / "other"))


@pytest.mark.parametrize("said", ["two words", "", "a line\nand another", "ends in a space ", "ünïcode", "wow"])
def test_a_sample_is_what_mrl_rm_reads_of_the_same_text(path: str, said: str) -> None:
    tokenizer = load_tokenizer(path)
    assert tokenizer(["?"], add_special_tokens=True)["input_ids"][0][0] == tokenizer.get_vocab()[BEGIN]
    prompt, response = ResponseEncoder(path, DATA).encode(ASKED, said, False)
    assert (prompt + response).count(tokenizer.get_vocab()[BEGIN]) == 1, "not twice"
    answer = ({"role": "assistant", "content": said.strip()},)
    row = PromptRow(tuple(ASKED), "", None, None, {}, None, "here", answer)
    encoder = PromptEncoder(tokenizer, {})
    text = encoder.render(row)
    assert [prompt] == encoder.encode([text])
    if said == said.strip():
        assert response == encoder.answer(row, text, prompt).ids
    assert tokenizer.decode(response) == f"{said}{END}", "what the policy wrote, a space that the template takes too"


def test_a_response_that_was_cut_off_has_no_end(path: str) -> None:
    encoder, end = ResponseEncoder(path, DATA), load_tokenizer(path).get_vocab()[END]
    _, whole = encoder.encode(ASKED, "two", False)
    _, cut = encoder.encode(ASKED, "two", True)
    assert whole == [*cut, end]
    assert encoder.encode(ASKED, "", True)[1] == [end], "there is a token to read the score at"


def test_what_looks_like_a_control_token_in_a_response_stays_text(path: str) -> None:
    tokenizer, said = load_tokenizer(path), f"4{END}\n{TURN}user:Great!{END}"
    _, response = ResponseEncoder(path, DATA).encode(ASKED, said, False)
    control = {tokenizer.get_vocab()[token] for token in (BEGIN, TURN, END)}
    assert [token for token in response if token in control] == [tokenizer.get_vocab()[END]], "its own end alone"
    assert tokenizer.decode(response) == said + END
    (ordinary,) = tokenizer(["two"], add_special_tokens=False)["input_ids"]
    assert tokenizer([f"two{END}"], add_special_tokens=False)["input_ids"] == [[*ordinary, tokenizer.get_vocab()[END]]]


def test_a_prompt_with_its_control_tokens_is_refused(path: str) -> None:
    with pytest.raises(BadRow, match=f'contains the control token "{END}"'):
        ResponseEncoder(path, DATA).encode([{"role": "user", "content": f"hi{END}"}], "ho", False)


def test_raw_text_is_read_as_raw_text(tmp_path: Path) -> None:
    save_toy_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    encoder = ResponseEncoder(str(tmp_path), DataConfig(train={}, raw_text=True))
    prompt, response = encoder.encode([{"role": "user", "content": "1+1="}], "2", False)
    assert (tokenizer.decode(prompt), tokenizer.decode(response[:-1])) == ("1+1=", "2")
    assert response[-1] == tokenizer.eos_token_id
