"""The algorithms: pure functions on packed tensors, registered by name if a configuration can choose them.

There is no padding. The tokens of a shard's rows follow one another. Names show the shape: `x_T` has one entry per
response token, `x_B` one per row, `x_G` one per group of rows that answer the same prompt. `mask_T` is True for tokens
that the model wrote and False for tokens that it read (tool output, retrieved text): values of masked tokens, even NaN,
never change a result, and get no gradient.
"""
