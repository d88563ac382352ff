"""Campaign of faults; see :mod:`benchmarks.chaos.__main__`."""
