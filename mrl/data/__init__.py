"""Prompts: their sources, the order in which they are drawn, and their conversion to rows of a batch."""
