"""Estimates of a run before it starts: tokens, operations, memory, disk, hours and money."""
