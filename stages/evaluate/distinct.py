"""Distinct-n of a corpus, without holding its texts. Pure.

Two definitions, over the words of all responses: the number of different n-grams by the number of
n-grams, as is common, and by the number of tokens, as in Li et al. 2016 (arXiv 1510.03055, §5.2).
Words, or tokens, are what white space separates; n-grams do not cross from one response to the
next. Both fall as a corpus grows: compare corpora of the same prompts and number of samples only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Hashes held back before they are merged: a bound on memory beside the distinct n-grams themselves.
_MERGE_AT = 1 << 21

_Hashes = npt.NDArray[np.uint64]


class DistinctCounter:
    """Counts distinct n-grams for n = 1…``max_n`` at 8 bytes each.

    n-grams are told apart by 64-bit hashes: among 10⁸ of them the chance of any collision is below
    10⁻³, and one moves the figure by 10⁻⁸.

    Args:
        max_n: Length of the longest n-grams.
    """

    def __init__(self, max_n: int) -> None:
        self._words: dict[str, int] = {}
        self._sets = [_HashSet() for _ in range(max_n)]
        self._totals = [0] * max_n

    def add(self, texts: Sequence[str]) -> None:
        """Adds responses to the corpus."""
        numbers: list[int] = []
        lengths = []
        for text in texts:
            words = text.split()
            numbers += [self._words.setdefault(word, len(self._words)) for word in words]
            lengths.append(len(words))
        words_hashed = _mix(np.array(numbers, dtype=np.uint64) + np.uint64(1))
        text_of_word = np.repeat(np.arange(len(texts)), lengths)
        hashes = words_hashed
        for n, (found, total) in enumerate(zip(self._sets, self._totals, strict=True), 1):
            if n > 1:
                # Before masking, hashes[i] covers words i … i+n-2.
                hashes = _mix(hashes[:-1] * np.uint64(0x9E3779B97F4A7C15) + words_hashed[n - 1 :])
            within = text_of_word[: len(hashes)] == text_of_word[n - 1 :]
            found.add(hashes[within])
            self._totals[n - 1] = total + int(np.count_nonzero(within))

    def per_ngram(self) -> list[float | None]:
        """Different n-grams by n-grams, n = 1…``max_n``; None where the corpus has no n-gram."""
        return [
            len(found) / total if total else None
            for found, total in zip(self._sets, self._totals, strict=True)
        ]

    def per_token(self) -> list[float | None]:
        """Different n-grams by tokens, n = 1…``max_n``; None where the corpus has no token."""
        tokens = self._totals[0]
        return [len(found) / tokens if tokens else None for found in self._sets]


class _HashSet:
    """A set of 64-bit hashes, as one sorted array and what is not merged into it yet."""

    def __init__(self) -> None:
        self._merged: _Hashes = np.zeros(0, dtype=np.uint64)
        self._pending: list[_Hashes] = []
        self._num_pending = 0

    def add(self, hashes: _Hashes) -> None:
        self._pending.append(hashes)
        self._num_pending += len(hashes)
        if self._num_pending > max(_MERGE_AT, len(self._merged)):
            self._merge()

    def _merge(self) -> None:
        self._merged = np.unique(np.concatenate([self._merged, *self._pending]))
        self._pending.clear()
        self._num_pending = 0

    def __len__(self) -> int:
        self._merge()
        return len(self._merged)


def _mix(values: _Hashes) -> _Hashes:
    """The bijection on 64-bit integers that ends splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
