"""Prompts: where they come from, in which order they are drawn, and how they become rows of a batch."""
