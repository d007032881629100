"""Log-probs and entropies computed in vocabulary tiles equal log_softmax, gradients too, on one rank or many."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.engine import vocab_head
from mrl.engine.vocab_head import HeadOptions, greedy_tokens, token_log_probs
from mrl.verify.spawn import run_distributed

T, H, V, VOCAB = 13, 8, 40, 37  # the last three columns of the weight are padding
NAMES = ("log_probs", "entropy", "d_hidden", "d_weight")
Results = dict[str, Tensor]


class Case:
    """Inputs in float64, and results of log_softmax."""

    def __init__(self, temperature: float = 0.7, seed: int = 0, scale: float = 1.0) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.temperature = temperature
        self.hidden = scale * torch.randn(T, H, dtype=torch.float64, generator=chance)
        self.weight = torch.randn(V, H, dtype=torch.float64, generator=chance)
        self.labels = torch.randint(0, VOCAB, (T,), generator=chance)
        self.labels[:2] = torch.tensor([0, VOCAB - 1])
        self.d_log_probs = torch.randn(T, dtype=torch.float64, generator=chance)
        self.d_entropy = torch.randn(T, dtype=torch.float64, generator=chance)

    def options(self, **changes: object) -> HeadOptions:
        return HeadOptions(**{"vocab": VOCAB, "temperature": self.temperature, "entropy": "grad"} | changes)  # type: ignore[arg-type]

    def expected(self, *, entropy_has_gradient: bool = True) -> Results:
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        every = torch.log_softmax((hidden @ weight.t())[:, :VOCAB] / self.temperature, dim=1)
        log_probs, entropy = every[torch.arange(T), self.labels], -(every.exp() * every).sum(1)
        loss = log_probs @ self.d_log_probs
        if entropy_has_gradient:
            loss = loss + entropy @ self.d_entropy
        return dict(zip(NAMES, (log_probs, entropy, *torch.autograd.grad(loss, (hidden, weight))), strict=True))

    def found(self, options: HeadOptions, dtype: torch.dtype = torch.float64, rows: slice = slice(None)) -> Results:
        hidden = self.hidden.to(dtype).requires_grad_()
        weight = self.weight[rows].to(dtype).requires_grad_()
        log_probs, entropy = token_log_probs(hidden, weight, self.labels, options)
        loss = log_probs @ self.d_log_probs.to(log_probs.dtype)
        if entropy is not None and entropy.requires_grad:
            loss = loss + entropy @ self.d_entropy.to(entropy.dtype)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        results = zip(NAMES, (log_probs, entropy, *gradients), strict=True)
        return {name: tensor.detach() for name, tensor in results if tensor is not None}


def worst(found: Results, expected: Results) -> float:
    """Return the largest difference, NaN if there is one. Results that were not computed count as equal."""
    return torch.stack([(tensor.double() - expected[name]).abs().max() for name, tensor in found.items()]).max().item()


@pytest.mark.parametrize(
    ("tile_columns", "temperature"), [(1, 1.0), (7, 0.6), (36, 1.3), (37, 0.6), (40, 1.3), (1000, 1.0), (None, 0.6)]
)
def test_equals_log_softmax_whatever_the_tiles(tile_columns: int | None, temperature: float) -> None:
    case = Case(temperature)
    assert worst(case.found(case.options(tile_columns=tile_columns)), case.expected()) < 1e-12


@pytest.mark.parametrize("entropy", ["none", "value"])
def test_entropy_without_gradient(entropy: str) -> None:
    case = Case()
    found = case.found(case.options(entropy=entropy, tile_columns=7))
    assert ("entropy" in found) == (entropy == "value")
    assert worst(found, case.expected(entropy_has_gradient=False)) < 1e-12
    _, value = token_log_probs(case.hidden.requires_grad_(), case.weight, case.labels, case.options(entropy=entropy))
    assert value is None or not value.requires_grad


def test_gradients_against_finite_differences() -> None:
    case = Case()
    hidden, weight = case.hidden[:3].requires_grad_(), case.weight.requires_grad_()

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(hidden, weight, case.labels[:3], case.options(tile_columns=7))

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_padding_has_no_gradient_and_its_values_do_not_matter() -> None:
    case = Case()
    before = case.found(case.options(tile_columns=7))
    case.weight[VOCAB:] = 1e6
    after = case.found(case.options(tile_columns=7))
    assert all(torch.equal(before[name], after[name]) for name in NAMES)
    assert not after["d_weight"][VOCAB:].any()


def test_only_what_is_trained_gets_a_gradient() -> None:
    case = Case()
    expected = case.expected(entropy_has_gradient=False)
    for name, tensor in (("d_hidden", case.hidden), ("d_weight", case.weight)):
        tensor.requires_grad_()
        log_probs, _ = token_log_probs(case.hidden, case.weight, case.labels, case.options(entropy="value"))
        (log_probs @ case.d_log_probs).backward()
        assert tensor.grad is not None
        assert (tensor.grad - expected[name]).abs().max() < 1e-12
        tensor.requires_grad_(False)
    assert case.hidden.grad is not None  # not touched by the second round
    assert (case.hidden.grad - expected["d_hidden"]).abs().max() < 1e-12


def test_inputs_are_left_as_they_were() -> None:
    case = Case()
    before = case.hidden.clone(), case.weight.clone(), case.labels.clone()
    case.found(case.options())
    assert all(torch.equal(old, new) for old, new in zip(before, (case.hidden, case.weight, case.labels), strict=True))


def test_no_tokens() -> None:
    case = Case()
    hidden = torch.zeros(0, H, requires_grad=True)
    weight = case.weight.float().requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, case.labels[:0], case.options())
    assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, H)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("label", [-1, -100, VOCAB, V - 1, V])
def test_a_label_that_is_no_token_has_no_chance(label: int) -> None:
    """Another token's log-prob, or a padding column's, would hide the error."""
    case = Case()
    case.labels[3] = label
    log_probs, _ = token_log_probs(case.hidden, case.weight, case.labels, case.options(tile_columns=7))
    assert log_probs[3] == -torch.inf
    assert log_probs.isfinite().sum() == T - 1


def tied() -> Case:
    """Return integers, whose products are exact: many positions have several likeliest tokens."""
    case = Case()
    case.hidden, case.weight = case.hidden.sign(), case.weight.sign()
    return case


def greedy_of(case: Case, vocab: int = VOCAB) -> list[int]:
    """Return the first of the likeliest tokens of each position, by Python's own maximum."""
    logits = (case.hidden @ case.weight.t())[:, :vocab].tolist()
    return [of_place.index(max(of_place)) for of_place in logits]


@pytest.mark.parametrize("tile_columns", [1, 7, 36, 37, 40, None])
def test_the_likeliest_token_is_the_first_of_equals_and_never_padding(tile_columns: int | None) -> None:
    for case in (Case(), tied()):
        case.weight[VOCAB:] = 1e6 * case.hidden.sum(0).sign()
        options = case.options(tile_columns=tile_columns)
        assert greedy_tokens(case.hidden, case.weight, options).tolist() == greedy_of(case)
    logits = (tied().hidden @ tied().weight.t())[:, :VOCAB]
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).any(), "there are ties"
    assert greedy_tokens(case.hidden[:0], case.weight, options).shape == (0,)


def test_a_broken_model_still_names_a_token() -> None:
    case = Case()
    case.hidden[4] = torch.nan
    assert 0 <= int(greedy_tokens(case.hidden, case.weight, case.options(tile_columns=7))[4]) < VOCAB


def test_labels_may_be_int32() -> None:
    case = Case()
    expected = case.expected()
    case.labels = case.labels.int()
    assert worst(case.found(case.options(tile_columns=7)), expected) < 1e-12


def test_large_logits_neither_overflow_nor_lose_the_entropy() -> None:
    case = Case(temperature=0.01, scale=10)
    found, expected = case.found(case.options(tile_columns=5)), case.expected()
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert worst({name: found[name] for name in NAMES[:2]}, expected) < 1e-9


def test_float32_keeps_float32_precision() -> None:
    case = Case()
    found = case.found(case.options(tile_columns=7), torch.float32)
    assert found["log_probs"].dtype == found["d_weight"].dtype == torch.float32
    assert worst(found, case.expected()) < 2e-5


def rounded_to_bfloat16() -> Case:
    """Return a case whose inputs are exact in bfloat16, so that only the computation can differ."""
    case = Case()
    case.hidden, case.weight = (x.to(torch.bfloat16).double() for x in (case.hidden, case.weight))
    return case


def check_bfloat16(found: Results, expected: Results, value_tolerance: float) -> None:
    assert found["log_probs"].dtype == found["entropy"].dtype == torch.float32
    assert found["d_hidden"].dtype == found["d_weight"].dtype == torch.bfloat16
    assert worst({name: found[name] for name in NAMES[:2]}, expected) < value_tolerance
    for name in NAMES[2:]:  # rounded once, to 8 bits
        assert worst({name: found[name]}, expected) < 2**-7 * expected[name].abs().max()


def test_bfloat16_is_computed_in_float32() -> None:
    case = rounded_to_bfloat16()
    check_bfloat16(case.found(case.options(tile_columns=7), torch.bfloat16), case.expected(), 2e-5)


def test_bfloat16_products_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: operands stay bfloat16. A float32 product replaces its matrix product."""

    def mm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert left.dtype == right.dtype == torch.bfloat16
        return left.to(out_dtype) @ right.to(out_dtype)

    def addmm(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert total.dtype == out_dtype == torch.float32
        assert total is out, "nothing of this size is made for each tile"
        return out.add_(mm(left, right, out_dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(vocab_head, "_operand_dtype", lambda hidden, weight, dtype: hidden.dtype)
    monkeypatch.setattr(torch, "mm", mm)
    case = rounded_to_bfloat16()
    check_bfloat16(case.found(case.options(tile_columns=7), torch.bfloat16), case.expected(), 2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    case = rounded_to_bfloat16()
    expected = case.expected()
    for name in ("hidden", "weight", "labels", "d_log_probs", "d_entropy"):
        setattr(case, name, getattr(case, name).cuda())
    found = {name: tensor.cpu() for name, tensor in case.found(case.options(tile_columns=7), dtype).items()}
    if dtype == torch.bfloat16:
        check_bfloat16(found, expected, 1e-4)
    else:
        assert worst(found, expected) < 1e-4


def compare_rank() -> None:
    """One of four ranks: compare its part of the results for tp 4 and for two groups of tp 2."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group, vocab, tile_columns in itertools.product((dist.group.WORLD, pairs[rank // 2]), (37, 25, 3), (4, None)):
        assert group is not None, "a rank is outside its group"
        shard = V // group.size()
        rows = slice(group.rank() * shard, (group.rank() + 1) * shard)
        case = Case()
        case.labels %= vocab
        found = case.found(case.options(vocab=vocab, group=group, tile_columns=tile_columns), rows=rows)
        dist.all_reduce(found["d_hidden"], group=group)
        whole = case.found(case.options(vocab=vocab))
        whole["d_weight"] = whole["d_weight"][rows]
        assert worst(found, whole) < 1e-12, f"{group.size()} ranks, {vocab} tokens: {worst(found, whole)}"
        for case in (Case(), tied()):
            case.weight[vocab:] = 1e6
            options = case.options(vocab=vocab, group=group, tile_columns=tile_columns)
            tokens = greedy_tokens(case.hidden, case.weight[rows], options).tolist()
            assert tokens == greedy_of(case, vocab), f"{group.size()} ranks, {vocab} tokens: {tokens}"
    case = Case()
    nothing, _ = token_log_probs(
        case.hidden[:0], case.weight[: V // 4], case.labels[:0], case.options(group=dist.group.WORLD)
    )
    assert nothing.shape == (0,), f"shape {nothing.shape}"


def test_tensor_parallel_ranks_get_what_one_rank_gets() -> None:
    """Includes sizes where the last ranks hold only padding."""
    run_distributed(4, compare_rank, timeout_s=120)
