"""Model families as tables: a model's sizes, and the slice of a Megatron tensor that each of its tensors maps to."""
