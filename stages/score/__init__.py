"""Scores of responses by an oracle: function, reward model, verifier, server or judge."""
