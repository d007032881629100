"""The built-in reward functions, by what they judge; `mrl.config.reward.BUILT_IN` says where each is.

Sample in, number out, or numbers by name, and the `answer` that was judged, as text. The docstring of a function is its
rule. They run in worker processes only.
"""
