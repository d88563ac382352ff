"""Evaluate stage: from scored samples of policy and base to metrics and samples."""
