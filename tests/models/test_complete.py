"""The proof of completeness: true for every family, and false as soon as a table is broken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mrl.config.schema import ParallelConfig as Layout
from mrl.errors import ModelError
from mrl.models.complete import check_complete
from mrl.models.decoder import Family
from mrl.models.families import FAMILIES, spec_of
from mrl.models.hf_config import HfConfig
from mrl.models.parameters import Parameter, RowRange
from mrl.models.regions import Shape
from mrl.models.spec import ModelSpec
from tests.models import published

SPEC = spec_of(HfConfig(published.LLAMA_31_70B, "config.json"))
QKV = "self_attention.linear_qkv.weight"


@dataclass(frozen=True)
class Broken(Family):
    """A family of which one row of one of the tables was changed, or left out."""

    name: str = ""
    change: Callable[[Any], Any] = lambda row: row

    def tensors(self, spec: ModelSpec, layer: int) -> dict[str, Shape]:
        tensors = super().tensors(spec, layer)
        if full := next((full for full in tensors if full.endswith(f"{layer}.{self.name}")), None):
            shape = self.change(tensors.pop(full))
            tensors |= {} if shape is None else {full: shape}
        return tensors

    def parameters(self, spec: ModelSpec, layer: int) -> Iterator[Parameter]:
        for parameter in super().parameters(spec, layer):
            changed = self.change(parameter) if parameter.name == self.name else parameter
            if changed is not None:
                yield changed


def each_row(change: Callable[[RowRange], RowRange]) -> Callable[[Parameter], Parameter]:
    return lambda parameter: replace(
        parameter, parts=tuple(tuple(change(rows) for rows in part) for part in parameter.parts)
    )


BROKEN: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a parameter left out": (
        "self_attention.linear_proj.weight",
        lambda _: None,
        "model.layers.0.self_attn.o_proj.weight: [0:8192, 0:8192] of [8192, 8192] is covered 0 times",
    ),
    "a tensor left out": ("mlp.up_proj.weight", lambda _: None, "mlp.up_proj.weight is not a tensor of this family"),
    "a tensor too long": (
        "self_attn.k_proj.weight",
        lambda _: (1032, 8192),
        "self_attn.k_proj.weight: [1024:1032, 0:8192] of [1032, 8192] is covered 0 times",
    ),
    "a tensor too short": ("self_attn.v_proj.weight", lambda _: (1000, 8192), "is outside [1000, 8192]"),
    "keys taken for values": (
        QKV,
        each_row(lambda rows: replace(rows, hf=rows.hf.replace("v_proj", "k_proj"))),
        "self_attn.v_proj.weight: [0:1024, 0:8192] of [1024, 8192] is covered 0 times",
    ),
    "groups that overlap": (
        QKV,
        each_row(lambda rows: replace(rows, start=max(0, rows.start - 4))),
        "is covered 2 times",
    ),
    "rows that no rank holds": (
        "mlp.linear_fc2.weight",
        each_row(lambda rows: replace(rows, stop=rows.stop - 4)),
        "mlp.down_proj.weight: [8188:8192, ",
    ),
}


@pytest.mark.parametrize("values", [published.LLAMA_31_70B, published.QWEN25_05B, published.MIXTRAL_8X22B])
@pytest.mark.parametrize(("layout", "head"), [(Layout(), "score"), (Layout(tp=2, pp=2, vpp=2), "lm")], ids=str)
def test_published_models_are_complete(values: dict[str, object], layout: Layout, head: str) -> None:
    check_complete(spec_of(HfConfig(values, "config.json")), layout, head)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4, pp=2)], ids=str)
def test_a_broken_table_is_found(monkeypatch: pytest.MonkeyPatch, what: str, layout: Layout) -> None:
    name, change, message = BROKEN[what]
    monkeypatch.setitem(FAMILIES, "llama", Broken("llama", "Llama", FAMILIES["llama"].read, name=name, change=change))
    with pytest.raises(ModelError) as caught:
        check_complete(SPEC, layout, "lm")
    assert message in str(caught.value)
    assert re.search(r"and \d+ more", str(caught.value))  # 80 layers are broken: the list is cut
