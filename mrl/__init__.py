"""mrl trains large language models with reinforcement learning: Megatron, Ray and vLLM, from a laptop to a cluster."""

__version__ = "0.1.0"
