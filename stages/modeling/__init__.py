"""Torch and transformers helpers that several stages share: checkpoints and chat templates."""
