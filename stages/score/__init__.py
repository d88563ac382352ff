"""Scores of responses by an oracle: a Python function, a reward model."""
