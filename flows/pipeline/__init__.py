"""The algorithm as data: configuration, outside inputs, and the steps of a run."""
