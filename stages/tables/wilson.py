"""Wilson's interval of a share (Wilson 1927): the one that win rates have, and that gates read."""

import math
from statistics import NormalDist


def wilson_interval(successes: float, trials: float, confidence: float) -> tuple[float, float]:
    """Two-sided interval of a share of independent trials; ZeroDivisionError without any trial.

    A bootstrap of a share of 0 or 1 has no width, however few the trials; this interval has.
    """
    share = successes / trials
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = share + z * z / (2 * trials)
    variance = share * (1 - share) / trials
    half = z * math.sqrt(variance + (z / (2 * trials)) ** 2)
    whole = 1 + z * z / trials
    low = (middle - half) / whole
    high = (middle + half) / whole
    return max(0.0, low), min(1.0, high)
