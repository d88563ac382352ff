"""Sft stage: supervised warm start of a policy, from an architecture or from a checkpoint."""
