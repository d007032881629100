"""Prints of tensors: digests and sketches that add up over parts. The diff of steps tests them on ranks."""

from __future__ import annotations

import math

import torch

from mrl.engine.tensor_prints import Prints


def test_parts_of_a_tensor_add_up_and_moved_values_change_the_digest() -> None:
    generator = torch.Generator().manual_seed(1)
    whole, moved = torch.randn(6, 10, generator=generator), torch.randn(6, 10, generator=generator)
    prints = Prints()
    prints.add("weight", "whole", whole, ((0, 6), (0, 10)))
    for rows, columns in (((0, 2), (0, 10)), ((2, 6), (0, 4)), ((2, 6), (4, 10))):
        part = whole[rows[0] : rows[1], columns[0] : columns[1]]
        prints.add("weight", "parts", part, (rows, columns))
    prints.add("weight", "swapped", whole.flip(0), ((0, 6), (0, 10)))
    prints.add("weight", "transposed", whole.T.contiguous(), ((0, 10), (0, 6)))
    prints.add("weight", "cubic", whole.view(2, 3, 10), ((0, 2), (0, 3), (0, 10)))
    prints.add("weight", "other", moved, ((0, 6), (0, 10)))
    by_name = {part.name: part for part in prints.read()}
    one, parts = by_name["whole"], by_name["parts"]
    assert (parts.digest, parts.count) == (one.digest, one.count)
    assert math.isclose(parts.squares, one.squares)
    assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(parts.sketch, one.sketch, strict=True))
    digests = [by_name[name].digest for name in ("whole", "swapped", "transposed", "cubic", "other")]
    assert len(set(digests)) == 5
    assert math.isclose(one.squares, float(whole.double().square().sum()))


def test_sketches_estimate_the_distance_of_tensors() -> None:
    """The root of the mean square over 16 sketches is within a factor of two for nearly all pairs."""
    generator = torch.Generator().manual_seed(3)
    ratios = []
    for _ in range(40):
        one = torch.randn(20, 30, generator=generator)
        other = one + 1e-3 * torch.randn(20, 30, generator=generator)
        prints = Prints()
        for name, values in (("one", one), ("other", other)):
            prints.add("weight", name, values, ((0, 20), (0, 30)))
        a, b = (part.sketch for part in prints.read())
        estimate = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))
        ratios.append(estimate / float((one.double() - other.double()).norm()))
    assert 0.9 < sum(ratio**2 for ratio in ratios) / len(ratios) < 1.1, "the estimate is not biased"
    assert sum(0.5 < ratio < 2 for ratio in ratios) >= 39
