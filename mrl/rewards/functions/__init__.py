"""The built-in reward functions, grouped by what they judge; `mrl.config.reward.BUILT_IN` maps names to locations.

A function takes a sample and returns a number, or numbers by name with the judged `answer` as text. Its docstring is
its rule. Functions run only in worker processes.
"""
