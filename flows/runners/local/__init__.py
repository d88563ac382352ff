"""Stages on this host: processes, logs, GPUs, and stores in a bucket."""
