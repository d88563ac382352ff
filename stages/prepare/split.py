"""Division of prompts among D_1…D_T and the test set. Pure.

Shapes: ``N`` rows of all sources, the ``test`` source's last.

Every decision looks only at the seed and the prompt's identity, so that it does not depend on the
order of rows. At 40 bytes a row, a million prompts cost tens of MiB, not their texts.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stages.contract.errors import UserError

TEST = 0
DROPPED = -1

Ids = npt.NDArray[np.void]
"""Identities of prompts, [N], 16 bytes each."""
Parts = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Destination of each row."""

    part: Parts
    """[N] the iteration (1…T), TEST, or DROPPED."""
    duplicates: int
    """Rows that repeat an earlier row of the same side (training or test)."""
    overlap: int
    """Distinct prompts of both sides, left out of one of them."""


def as_ids(identities: bytes | bytearray) -> Ids:
    """Views the concatenated identities of N prompts as [N]."""
    return np.frombuffer(identities, dtype="V16")


def split(
    ids: Ids,
    sources: Parts,
    *,
    iterations: int,
    test_prompts: int,
    prompts_per_iteration: int | None,
    seed: int,
    overlap_stays_in_train: bool = False,
) -> Split:
    """Divides the prompts.

    Args:
        ids: [N] identities of all rows.
        sources: [N] 0 for a row of the ``test`` source, s for one of the s-th training source.
            There are either one training source or T of them.
        iterations: T.
        test_prompts: Prompts to hold out if no row is of a ``test`` source.
        prompts_per_iteration: Most prompts in each of D_1…D_T; None takes all.
        seed: Decides who is held out, who goes to which part, and who is above the cap.
        overlap_stays_in_train: Whether a prompt of the ``test`` source that is a training prompt,
            too, is left out of the test set, and not out of training.
    """
    test = _first_rows(ids, np.flatnonzero(sources == 0))
    train = _shuffled(ids, _first_rows(ids, np.flatnonzero(sources != 0)), seed)
    duplicates = len(ids) - len(train) - len(test)
    overlap = np.intersect1d(ids[test], ids[train])
    if not len(test):
        if test_prompts >= len(train):
            raise UserError(
                f"test_prompts is {test_prompts}, but there are only {len(train)} distinct prompts",
                "lower prepare.test_prompts, add prompts, or set inputs.test_prompts",
            )
        test = train[:test_prompts]
        train = train[test_prompts:]
    elif not overlap_stays_in_train:
        train = train[~np.isin(ids[train], overlap)]
    elif len(overlap) == len(test):
        raise UserError(
            f"all {len(test)} prompts of the `test` source are training prompts",
            "give other test prompts, or set `overlap` to drop_from_train",
        )
    else:
        test = test[~np.isin(ids[test], overlap)]
    part = np.full(len(ids), DROPPED, dtype=np.int32)
    part[test] = TEST
    # By all rows: prompts of the other sources may all have come in the first one.
    several = sources.max(initial=0) > 1
    part[train] = sources[train] if several else _cut(len(train), iterations, prompts_per_iteration)
    for iteration in range(1, iterations + 1):
        mine = train[part[train] == iteration]
        if len(mine) == 0:
            raise UserError(
                f"no prompts are left for iteration {iteration} of {iterations} ({len(train)} "
                "distinct training prompts that are not in the test set)",
                "give more prompts, or lower `iterations` or `test_prompts`",
            )
        part[mine[prompts_per_iteration or len(mine) :]] = DROPPED
    return Split(part, duplicates, len(overlap))


def _cut(num_prompts: int, iterations: int, cap: int | None) -> Parts:
    """[M] the iteration of each prompt of a single source, in shuffled order.

    With enough prompts for a cap, parts are cut at multiples of it, and the last one takes the
    rest: more iterations then leave the parts of the first ones as they were. Otherwise parts
    differ by at most one prompt.
    """
    places = np.arange(num_prompts, dtype=np.int64)
    if cap is not None and cap * iterations <= num_prompts:
        return np.minimum(1 + places // cap, iterations).astype(np.int32)
    return (1 + places * iterations // max(num_prompts, 1)).astype(np.int32)


def _first_rows(ids: Ids, rows: Rows) -> Rows:
    """Those of the rows that are the first with their identity."""
    return rows[np.unique(ids[rows], return_index=True)[1]]


def _shuffled(ids: Ids, rows: Rows, seed: int) -> Rows:
    """The rows in the order that the seed gives their identities."""
    key = hashlib.sha256(str(seed).encode()).digest()
    mixed = bytearray()
    for row in rows:
        mixed += hashlib.blake2b(ids[row].tobytes(), digest_size=16, key=key).digest()
    return rows[np.argsort(as_ids(mixed))]
