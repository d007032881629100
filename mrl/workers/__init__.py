"""The workers of a run: one rank of a Megatron model each, with the methods that the trainer calls through a group."""
