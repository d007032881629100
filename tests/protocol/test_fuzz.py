"""Columns that were damaged in transit, or written by others: each gives a column or a `WireError`."""

from __future__ import annotations

import json
import struct

import torch

from mrl.errors import WireError
from mrl.protocol.columns import jagged, object_array
from mrl.protocol.wire import _PREFIX, Wire, decode, encode
from tests.fuzzing import changed, damaged, rounds


def test_damaged_columns() -> None:
    originals = [
        encode(jagged(torch.arange(40, dtype=torch.int32), [10, 30]), "x"),
        encode(torch.rand(5, 3), "x"),
        encode(object_array(["a", {"b": 1}]), "x"),
        encode(jagged(torch.ones(40, dtype=torch.bool), [10, 30]), "x"),
    ]
    refused = 0
    for chance in rounds("wire"):
        for _ in range(100):
            wire = chance.choice(originals)
            head, body = bytes(wire.head), bytes(wire.body)
            magic, size = _PREFIX.unpack_from(head)
            header, rest = json.loads(head[_PREFIX.size : _PREFIX.size + size]), head[_PREFIX.size + size :]
            if chance.random() < 0.7:  # a header that is well formed, and says something else
                text = json.dumps(changed(header, chance)).encode()
                head = struct.pack(_PREFIX.format, magic, len(text)) + text + rest
            if chance.random() < 0.5:
                head = damaged(head, chance)
            if chance.random() < 0.5:
                body = damaged(body, chance)
            try:
                decode(Wire(head, body))
            except WireError:
                refused += 1
    assert refused
