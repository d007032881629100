"""Settings that a configuration passes on to Megatron and vLLM: which fields there are, and which are accepted."""
