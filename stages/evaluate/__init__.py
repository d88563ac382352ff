"""Evaluate stage: from scored samples of policy and base to metrics, samples and plot data."""
