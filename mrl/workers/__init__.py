"""Workers of a run: one rank of a Megatron model each, with methods that the trainer calls through a group."""
