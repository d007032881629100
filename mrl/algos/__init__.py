"""The algorithms: pure functions on packed tensors, by name where a configuration chooses one.

Nothing is padded. The tokens of a shard's rows stand one after another; names say the shape: `x_T` has one
entry per response token, `x_B` one per row, `x_G` one per group of rows that answer the same prompt.
`mask_T` is True on tokens that the model wrote and False on what it read (tool output, retrieved text):
whatever stands on a masked token, NaN included, changes no result and gets no gradient.
"""
