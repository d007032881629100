"""What a configuration takes before it runs: bytes of every device in every phase, seconds of a step, better layouts.

Pure arithmetic: no torch, no weights, no GPU. Start reading at `memory.py`.
"""
