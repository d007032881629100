"""Memory of every device in every phase, seconds of a step, and better layouts of a configuration, before it runs.

Pure arithmetic: no torch, no weights, no GPU. Start reading at `memory.py`.
"""
