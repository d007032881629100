"""mrl trains large language models with reinforcement learning: Megatron, Ray and vLLM, from a laptop to a cluster."""

from __future__ import annotations

__version__ = "0.1.0"
