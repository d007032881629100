"""The writer makes directories that transformers loads, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mrl.config.schema import ParallelConfig as Layout
from mrl.errors import ModelError
from mrl.models import hf_writer
from mrl.models.families import read_spec
from mrl.models.hf_reader import HfReader, load_shard
from mrl.models.hf_writer import HfWriter, padding_token
from mrl.models.layout import RankPlace
from mrl.models.regions import slices
from mrl.models.table import shards_of
from tests.models.conftest import Tiny
from tests.models.quantized import quantize
from tests.models.tiny_models import CORRECTION_BIAS, TINY_FAMILIES

LAYOUT = Layout(tp=2, pp=2)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_writer, "MAX_FILE_BYTES", 200_000)


def write_from_ranks(source: Path, target: Path, head: Literal["lm", "score"]) -> None:
    """Scatter a model over the ranks of a layout and write it from there, each element from its first holder."""
    spec, reader = read_spec(source), HfReader(source)
    written = set()
    with HfWriter(target, spec, source, head, torch.float32) as writer:
        for place in [RankPlace(tp=tp, pp=pp) for pp in (1, 0) for tp in (1, 0)]:
            for shard in shards_of(spec, LAYOUT, place, head):
                tensor = load_shard(reader, shard, torch.float32)
                for piece in shard.pieces:
                    if (piece.hf, piece.source) not in written:
                        written.add((piece.hf, piece.source))
                        writer.write(piece.hf, tensor[slices(piece.target)], piece.source)


@pytest.mark.usefixtures("small_files")
def test_correction_biases_stay_float32_in_a_bfloat16_export(tiny: Tiny, tmp_path: Path) -> None:
    source, target = tiny("glm4_moe"), tmp_path / "written"
    tensors = load_file(source / "model.safetensors")
    with HfWriter(target, read_spec(source), source, "lm", torch.bfloat16) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors.values())
    wide = {name: tensor for name, tensor in tensors.items() if name.endswith(CORRECTION_BIAS)}
    written = HfReader(target)
    for name, tensor in tensors.items():
        expected = tensor if name in wide else tensor.bfloat16()
        assert written.whole(name).dtype == expected.dtype, name
        assert torch.equal(written.whole(name), expected), name
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(map(torch.numel, [*tensors.values(), *wide.values()]))


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_what_ranks_wrote_is_the_model(tiny: Tiny, tmp_path: Path, family: str) -> None:
    source, target = tiny(family), tmp_path / "written"
    write_from_ranks(source, target, "lm")
    sizes = [file.stat().st_size for file in sorted(target.glob("*.safetensors"))]
    assert len(sizes) > 2
    assert all(one + other > 200_000 for one, other in pairwise(sizes)), "no two files fit into one"
    HfReader(target).check(read_spec(target), "lm")
    before = AutoModelForCausalLM.from_pretrained(source)
    after, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = after.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in before.state_dict().items())
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(after(tokens).logits, before(tokens).logits)


def test_a_written_model_says_that_it_has_no_predicting_layers(tiny: Tiny, tmp_path: Path) -> None:
    config = json.loads((tiny("glm4_moe") / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    write_from_ranks(tiny("glm4_moe"), tmp_path / "written", "lm")
    written = json.loads((tmp_path / "written/config.json").read_text())
    assert written == config | {"num_nextn_predict_layers": 0}


def with_predicting_layer(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Copy a model and add a layer that predicts more tokens. Return the tensors of that layer."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    layer = {
        "model.layers.4.eh_proj.weight": torch.randn(64, 128),
        "model.layers.4.shared_head.norm.weight": torch.randn(64).bfloat16(),
    }
    save_file(tensors | layer, target / "model.safetensors", {"format": "pt"})
    return layer


@pytest.mark.parametrize("is_quantized", [False, True], ids=["unquantized", "from FP8"])
def test_a_predicting_layer_is_kept_if_the_user_asks(tiny: Tiny, tmp_path: Path, is_quantized: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "written"
    layer = with_predicting_layer(tiny("glm4_moe"), source)
    weights = load_file(tiny("glm4_moe") / "model.safetensors")
    if is_quantized:
        quantize(source)
        layer = {name: HfReader(source).whole(name) for name in layer}
        layer["model.layers.4.eh_proj.weight"] = layer["model.layers.4.eh_proj.weight"].bfloat16()
    with HfWriter(target, read_spec(source), source, "lm", torch.bfloat16, keeps_mtp=True) as writer:
        for name, tensor in weights.items():
            writer.write(name, tensor + 1)
    written = load_file(target / "model.safetensors")
    assert written.keys() == weights.keys() | layer.keys()
    for name, tensor in layer.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 1
    _, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]


def test_a_predicting_layer_that_does_not_exist_cannot_be_kept(tiny: Tiny, tmp_path: Path) -> None:
    for source, head, what in (
        (tiny("llama"), "lm", "this model has no layers that predict more tokens"),
        (tiny("deepseek_v3"), "score", "a model with a score head has no layers that predict more tokens"),
    ):
        spec = replace(read_spec(source), num_predicting_layers=int(head == "score"))
        with pytest.raises(ModelError, match=what):
            HfWriter(tmp_path / "written", spec, source, head, torch.bfloat16, keeps_mtp=True)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_score_head_is_written_and_loads(tiny: Tiny, tmp_path: Path) -> None:
    source, target = tiny("qwen2", "score"), tmp_path / "written"
    write_from_ranks(source, target, "score")
    assert [file.name for file in target.glob("*.safetensors*")] == ["model.safetensors"]
    model = AutoModelForSequenceClassification.from_pretrained(target)
    before = AutoModelForSequenceClassification.from_pretrained(source)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before(tokens).logits)


def test_a_language_model_becomes_a_classifier_by_its_new_head(tiny: Tiny, tmp_path: Path) -> None:
    source, target = tiny("llama"), tmp_path / "critic"
    spec = read_spec(source)
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, spec.hidden)
    with HfWriter(target, spec, source, "score", torch.bfloat16) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["dtype"] == "bfloat16"
    model = AutoModelForSequenceClassification.from_pretrained(target)
    assert model.config.num_labels == 1
    assert torch.equal(model.score.weight, tensors["score.weight"].bfloat16())


def test_the_tokenizer_and_generation_settings_come_along(tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((tiny("llama") / name).read_bytes())
    copied = ("tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt")
    for name in (*copied, "README.md", "run.py"):
        (source / name).write_text(f"{{}} {name}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").touch()
    (source / "pytorch_model.bin.index.json").touch()
    write_from_ranks(source, tmp_path / "written", "lm")
    names = {file.name for file in (tmp_path / "written").rglob("*") if file.is_file()}
    assert names == {"config.json", "model.safetensors", "tool_use.jinja", *copied}
    assert (tmp_path / "written/tokenizer.json").read_text() == "{} tokenizer.json"


def test_the_first_files_kept_their_type_under_another_key(tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((tiny("llama") / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    (source / "model.safetensors").write_bytes((tiny("llama") / "model.safetensors").read_bytes())
    assert read_spec(source).dtype == "bfloat16"
    write_from_ranks(source, tmp_path / "written", "lm")
    written = json.loads((tmp_path / "written/config.json").read_text())
    assert written["torch_dtype"] == "float32"
    assert "dtype" not in written


def test_an_existing_directory_is_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ModelError, match="already exists"):
        write_from_ranks(tiny("llama"), tmp_path / "mine", "lm")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def without_the_norm(writer: HfWriter) -> None:
    pass


def half_of_the_norm(writer: HfWriter) -> None:
    writer.write("model.norm.weight", torch.ones(32), ((0, 32),))


def some_of_the_norm_twice(writer: HfWriter) -> None:
    writer.write("model.norm.weight", torch.ones(64))
    writer.write("model.norm.weight", torch.ones(4), ((0, 4),))


@pytest.mark.parametrize(
    ("write_norm", "message"),
    [
        (without_the_norm, "model.norm.weight: [0:64] of [64] is covered 0 times"),
        (half_of_the_norm, "model.norm.weight: [32:64] of [64] is covered 0 times"),
        (some_of_the_norm_twice, "model.norm.weight: [0:4] of [64] is covered 2 times"),
    ],
)
def test_a_model_that_is_not_whole_never_appears(
    tiny: Tiny, tmp_path: Path, write_norm: Callable[[HfWriter], None], message: str
) -> None:
    source = tiny("llama")

    def write() -> None:
        with HfWriter(tmp_path / "written", read_spec(source), source, "lm", torch.float32) as writer:
            for name, tensor in load_file(source / "model.safetensors").items():
                if name != "model.norm.weight":
                    writer.write(name, tensor)
            write_norm(writer)

    with pytest.raises(ModelError) as caught:
        write()
    assert caught.value.what == f"not every weight was written exactly once:\n  - {message}"
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_writing_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama")
    spec = read_spec(source)

    def write() -> None:
        with HfWriter(tmp_path / "written", spec, source, "lm", torch.float32):
            assert len(list(tmp_path.iterdir())) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_belong_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama")
    for name, shape, message in (
        ("model.norm", (64,), "is not a tensor of this model"),
        ("model.norm.weight", (63,), r"received a tensor of shape \[63\]"),
    ):
        with (
            pytest.raises(ModelError, match=message),
            HfWriter(tmp_path / "written", read_spec(source), source, "lm", torch.float32) as writer,
        ):
            writer.write(name, torch.ones(shape))


def test_weights_are_not_written_as_integers(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be written as torch\.int8"):
        HfWriter(tmp_path / "written", read_spec(tiny("llama")), tiny("llama"), "lm", torch.int8)


@pytest.mark.parametrize(
    ("config", "generation", "settings", "tokens", "expected"),
    [
        ({"pad_token_id": 7, "eos_token_id": 2}, {}, {}, {}, 7),
        ({"pad_token_id": 5, "eos_token_id": [2, 5]}, {}, {}, {}, None),
        ({"pad_token_id": 5, "eos_token_id": 2}, {"eos_token_id": [2, 5]}, {}, {}, None),
        ({"eos_token_id": 2}, {}, {"pad_token": "<pad>"}, {"<pad>": 9}, 9),
        ({"eos_token_id": 2}, {}, {"pad_token": "</s>", "eos_token": "</s>"}, {"</s>": 3}, None),
        ({"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 1}, {}, {}, {"<|right_pad_id|>": 11}, 11),
        ({}, {}, {}, {}, None),
    ],
)
def test_padding_is_a_token_that_ends_nothing(
    tmp_path: Path,
    config: dict[str, Any],
    generation: dict[str, Any],
    settings: dict[str, Any],
    tokens: dict[str, int],
    expected: int | None,
) -> None:
    added = [{"id": number, "content": text} for text, number in tokens.items()]
    contents = {"config": config, "generation_config": generation, "tokenizer_config": settings}
    for name, content in contents.items():
        if content:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert padding_token(tmp_path) == expected
