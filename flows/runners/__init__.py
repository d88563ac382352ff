"""Runners: start a stage's program and wait for it, on this host, in containers or on workers."""
