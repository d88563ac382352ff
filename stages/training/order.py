"""Order in which a training sees its samples; without torch, for reports too."""

import math
from functools import lru_cache

import numpy as np

from stages.contract.digests import derive_seed


def steps_per_epoch(num_samples: int, global_batch: int) -> int:
    """Optimizer steps in one epoch; the last may see fewer samples."""
    return math.ceil(num_samples / global_batch)


def places_of_step(num_samples: int, global_batch: int, seed: int, step: int) -> list[int]:
    """Places of the samples of a step (from 0), in the epoch's shuffled order."""
    epoch, batch = divmod(step, steps_per_epoch(num_samples, global_batch))
    order = _permutation(num_samples, derive_seed(seed, "order", epoch))
    return order[batch * global_batch : (batch + 1) * global_batch].tolist()


# The order of an epoch, for all of its steps: drawn for each of them it takes minutes of a million
# samples.
@lru_cache(maxsize=2)
def _permutation(length: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).permutation(length)
