"""Pair stage: from scored responses to preference pairs."""
