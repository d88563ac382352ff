"""Stages on this host: processes, the fork server, and GPUs."""
