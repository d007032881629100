"""Model families as tables: a model's sizes, and which slice of which Megatron tensor each of its tensors is."""
