"""The mathematics of GEB: divergences, exploratory bonuses and losses (docs/equations.md).

Pure functions of log-probabilities, per sequence; the caller reduces.
"""
