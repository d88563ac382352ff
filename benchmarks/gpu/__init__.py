"""Benchmark of one GPU without a network: the head, training steps, sampling."""
