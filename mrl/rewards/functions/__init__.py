"""The built-in reward functions: one file each, with one function `score` whose docstring is its rule.

Sample in, number (or numbers by name) out. They run in worker processes only.
"""

from __future__ import annotations
