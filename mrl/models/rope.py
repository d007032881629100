"""Rotary position embeddings: base, scaling, and the frequencies that transformers computes from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrl.models.hf_config import HfConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LinearScaling:
    """Divides positions by a factor."""

    factor: float

    def frequencies(self, powers: torch.Tensor, theta: float) -> torch.Tensor:
        return 1.0 / powers / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: divides long wavelengths by a factor, keeps short ones, with a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def frequencies(self, powers: torch.Tensor, theta: float) -> torch.Tensor:
        import torch

        frequencies = 1.0 / powers
        wavelengths = 2 * math.pi / frequencies
        longest_kept = self.original_max_positions / self.high_freq_factor
        shortest_divided = self.original_max_positions / self.low_freq_factor
        ramp = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        # Divide before multiplying, in this order: the result equals transformers' bit for bit.
        between = (1 - ramp) * frequencies / self.factor + ramp * frequencies
        scaled = torch.where(wavelengths > shortest_divided, frequencies / self.factor, between)
        return torch.where(wavelengths < longest_kept, frequencies, scaled)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: divides the frequencies of dimensions that turn slowly, with a ramp, and makes attention sharper."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    mscale: float
    """Strength of the sharpening. It acts on the scale of the softmax, and not on cosines and sines."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole dimensions."""

    @property
    def softmax_factor(self) -> float:
        """Factor of the softmax's scale. It equals a factor of cosines and sines, squared, if all dimensions rotate."""
        return (0.1 * self.mscale * math.log(self.factor) + 1) ** 2

    def frequencies(self, powers: torch.Tensor, theta: float) -> torch.Tensor:
        import torch

        def dimension(turns: float) -> float:
            """Return the dimension that turns so often within the original positions."""
            return (dim * math.log(self.original_max_positions / (turns * 2 * math.pi))) / (2 * math.log(theta))

        dim = 2 * len(powers)
        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        low = max(math.floor(first) if self.truncate else first, 0)
        high = float(min(math.ceil(last) if self.truncate else last, dim - 1))
        if low == high:
            high += 0.001  # as in transformers: the ramp becomes a step
        kept = 1 - torch.clamp((torch.arange(len(powers), dtype=torch.float32) - low) / (high - low), 0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model."""

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def inverse_frequencies(self) -> torch.Tensor:
        """Return one angle per position step for each pair of dimensions, bit-identical to transformers."""
        import torch

        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64).to(torch.float32) / self.dim
        powers: torch.Tensor = self.theta**exponents
        return self.scaling.frequencies(powers, self.theta) if self.scaling else 1.0 / powers


def read_rope(config: HfConfig, dim: int, *, partial: bool = False, yarn: bool = False) -> Rope:
    """Read the rotary embedding in `config.json`: from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    A `partial` one rotates only the first dimensions of a head, in halves of these dimensions. Only families whose
    attention takes the scale of YaRN's softmax allow `yarn`.
    """
    known = [name for name in ("rope_scaling", "rope_parameters") if name in config]
    settings = config.section(known[0]) if known else HfConfig({}, config.where)
    if partial:
        dim = _rotated(settings if "partial_rotary_factor" in settings else config, dim)
    else:
        for section in (config, settings):
            section.require("partial_rotary_factor", 1.0)
    if any(isinstance(value, dict) for value in settings.values.values()):
        raise settings.error("rope_type", "only one rotary embedding for all layers is supported", "use another model")
    theta = (settings if "rope_theta" in settings else config).number("rope_theta")
    kind = settings.defaulting(type="default").text("rope_type", "type")
    if kind == "default":
        return Rope(dim, theta)
    if kind == "linear":
        return Rope(dim, theta, LinearScaling(settings.number("factor")))
    if kind == "llama3" and not yarn:
        scaling = Llama3Scaling(
            factor=settings.number("factor"),
            low_freq_factor=settings.number("low_freq_factor"),
            high_freq_factor=settings.number("high_freq_factor"),
            original_max_positions=settings.integer("original_max_position_embeddings"),
        )
        return Rope(dim, theta, scaling)
    if kind == "yarn" and yarn:
        return Rope(dim, theta, _read_yarn(settings))
    raise settings.error(
        "rope_type",
        f'"{kind}" is not supported, only default, linear and {"yarn" if yarn else "llama3"}',
        fix="take the scaling out of the file if your sequences fit the model's original length",
    )


def _read_yarn(settings: HfConfig) -> YarnScaling:
    settings.require("truncate", True, "vLLM always rounds the ends of the ramp")
    settings.require("attention_factor", None, "vLLM takes the factor from mscale and mscale_all_dim")
    mscale = settings.number("mscale_all_dim")
    settings.require("mscale", mscale, "with another value than mscale_all_dim, cosines and sines would need a factor")
    settings = settings.defaulting(beta_fast=32, beta_slow=1)
    return YarnScaling(
        factor=settings.number("factor"),
        beta_fast=settings.number("beta_fast"),
        beta_slow=settings.number("beta_slow"),
        original_max_positions=settings.integer("original_max_position_embeddings"),
        mscale=mscale,
    )


def _rotated(section: HfConfig, dim: int) -> int:
    """Return the number of dimensions that a partial rotary embedding rotates."""
    factor = section.number("partial_rotary_factor")
    rotated = int(dim * factor)
    if not 0 < rotated <= dim or rotated % 2:
        raise section.error("partial_rotary_factor", f"{factor} of {dim} dimensions is not an even number up to {dim}")
    return rotated
