from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import BatchError, WireError
from mrl.protocol.columns import Column, Jagged, from_rows, jagged, object_array
from mrl.protocol.wire import Wire, decode, encode

DTYPES = [
    torch.int32,
    torch.int64,
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float16,
    torch.uint8,
    torch.bool,
]


def same(left: Column, right: Column) -> bool:
    """Return whether kind, type, shape and every bit of every value are equal."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return list(left) == list(right)
    if isinstance(left, Jagged) or isinstance(right, Jagged):
        alike = (
            isinstance(left, Jagged) and isinstance(right, Jagged) and left.lengths.tolist() == right.lengths.tolist()
        )
        return alike and same(left.values, right.values)
    if left.dtype != right.dtype:
        return False
    bits = torch.int16 if left.dtype == torch.bfloat16 else torch.uint8
    return left.shape == right.shape and torch.equal(left.view(-1).view(bits), right.view(-1).view(bits))


@given(
    lengths=st.lists(st.integers(0, 9), max_size=8),
    dtype=st.sampled_from(DTYPES),
    trailing=st.sampled_from([(), (3,), (2, 2)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_jagged_columns_survive(lengths: list[int], dtype: torch.dtype, trailing: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    values = torch.randint(0, 2, (sum(lengths), *trailing)).to(dtype) * torch.tensor(7).to(dtype)
    column = jagged(values, torch.tensor(lengths, dtype=torch.int64))
    assert same(decode(encode(column, "x")), column)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (0, 7)])
def test_dense_columns_survive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    column = (torch.rand(shape) * 100).to(dtype)
    assert same(decode(encode(column, "x")), column)


@pytest.mark.parametrize(
    "items",
    [
        [],
        ["", "a", "日本語", "\ud800"],
        [1, 2.5, None, True],
        [{"answer": ["42"]}, {}],
        [[1, 2], [3, 4]],
    ],
)
def test_object_columns_survive(items: list[object]) -> None:
    assert same(decode(encode(object_array(items), "x")), object_array(items))


def test_non_finite_floats_keep_their_bits() -> None:
    column = from_rows([torch.tensor([float("nan"), float("inf"), -0.0])])
    assert same(decode(encode(column, "x")), column)


def test_nothing_is_sent_that_follows_from_lengths() -> None:
    lengths = [2500] * 64
    tokens = encode(jagged(torch.zeros(160_000, dtype=torch.int32), lengths), "responses")
    mask = encode(jagged(torch.ones(160_000, dtype=torch.bool), lengths), "response_mask")
    assert 160_000 * 4 <= tokens.nbytes <= 160_000 * 4 + 1024
    assert mask.nbytes <= 1024, "a mask that is all true follows from its lengths"
    assert torch.equal(decode(mask).values, torch.ones(160_000, dtype=torch.bool))


def test_neither_writing_nor_reading_copies_the_values() -> None:
    column = jagged(torch.arange(1000, dtype=torch.int32), [400, 600])
    assert decode(encode(column, "x")).values.data_ptr() == column.values.data_ptr()


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(BatchError, match=r"column `c` has dtype complex64, which cannot be sent"):
        encode(torch.zeros(2, dtype=torch.complex64), "c")
    with pytest.raises(BatchError, match=r"column `o` cannot be sent: Object of type object is not JSON"):
        encode(object_array([object()]), "o")
    with pytest.raises(BatchError, match=r"column `n` cannot be sent: Out of range float"):
        encode(object_array([float("nan")]), "n")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"kind":"pickle"}', 'unknown column kind "pickle"'),
        (b'{"kind":"dense","dtype":"object","shape":[1]}', "header is incomplete"),
        (b'{"kind":"dense","dtype":"int32","shape":[-1]}', "cannot have shape"),
        (b'{"kind":"dense","dtype":"int32","shape":[9]}', "takes 36 bytes, but there are 0"),
        (b'{"kind":"jagged","dtype":"int32","shape":[9],"rows":1000000}', "1000000 row lengths do not match"),
        (b"[1]", "not a JSON object"),
        (b"{", "not JSON"),
    ],
)
def test_lying_headers_are_refused(header: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(Wire(b"mrl1" + len(header).to_bytes(4, "little") + header, b""))


def test_row_lengths_below_zero_are_refused_though_they_add_up() -> None:
    head, body = encode(jagged(torch.arange(2, dtype=torch.int32), [1, 1]), "x")
    honest, lying = (np.array(lengths, dtype=np.int32).tobytes() for lengths in ([1, 1], [-1, 3]))
    assert head.endswith(honest)
    with pytest.raises(WireError, match="the row lengths sum to 2"):
        decode(Wire(head[: -len(lying)] + lying, body))


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(WireError, match="not a column in this format"):
        decode(Wire(b"\x80\x05\x95 a pickle, for instance", b""))
