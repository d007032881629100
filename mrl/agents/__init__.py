"""Conversations of several turns: the model acts, an environment answers, and the origin of every token is known."""
