"""The built-in reward functions: one file each, with one function `score` whose docstring is its rule.

Sample in, number out, or numbers by name, and the `answer` that was judged, as text. They run in worker processes only.
"""
