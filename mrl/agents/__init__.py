"""Conversations of several turns: the model acts, an environment answers, and every token knows who wrote it."""
