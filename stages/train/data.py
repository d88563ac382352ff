"""Preference pairs as token ids, what was left out of them, and their micro-batches.

The sampled token ids are used as they are; nothing is tokenised again.

Shapes: `B` pairs, `S` tokens of a response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.contract.errors import UserError
from stages.tables.schemas import PAIRS, read_rows
from stages.train.params import LengthParams, TrainParams
from stages.training.batches import IntArray, Sample

_SIDE_COLUMNS = ("token_ids", "logprobs", "score")
_COLUMNS = (
    "prompt_id",
    "prompt_token_ids",
    "tie",
    *(f"{side}_{name}" for side in ("chosen", "rejected") for name in _SIDE_COLUMNS),
)

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Response:
    """One response to a prompt."""

    token_ids: IntArray
    logprobs: FloatArray
    """The sampler's log π of each token, [S]."""
    score: float


@dataclass(frozen=True)
class Pair(Sample):
    """A prompt with the preferred and the other response."""

    index: int
    """Place of the pair among all rows of the tables; its identity in the artifact."""
    prompt_id: str
    prompt: IntArray
    chosen: Response
    rejected: Response
    tie: bool
    """Neither is preferred: the pair has no preference loss."""

    @property
    def sides(self) -> tuple[Response, Response]:
        """The chosen and the rejected response."""
        return self.chosen, self.rejected

    @property
    def responses(self) -> tuple[IntArray, ...]:
        """Token ids of the two."""
        return self.chosen.token_ids, self.rejected.token_ids

    @property
    def loss_terms(self) -> int:
        """One: the loss is a mean over pairs."""
        return 1


def load_pairs(paths: Sequence[Path], params: TrainParams) -> tuple[list[Pair], int]:
    """Reads the pairs; the number is how many were cut to the length limit.

    Raises:
        UserError: A table is malformed, or nothing in it would change the policy.
    """
    pairs: list[Pair] = []
    num_truncated = 0
    for index, row in enumerate(read_rows(paths, PAIRS, columns=_COLUMNS)):
        pair = _pair(index, row)
        if pair.row_tokens > params.max_length_tokens:
            num_truncated += 1
            pair = truncate(pair, params)
        pairs.append(pair)
    _check_trainable(pairs, params)
    return pairs, num_truncated


def truncate(pair: Pair, lengths: LengthParams) -> Pair:
    """Cuts an over-long pair: the prompt keeps its last, the responses their first tokens."""
    prompt = pair.prompt[-lengths.max_prompt_tokens :]
    room = lengths.max_length_tokens - len(prompt)

    def cut(response: Response) -> Response:
        logprobs = response.logprobs[:room]
        if len(prompt) < len(pair.prompt):
            # They are those after the whole prompt.
            logprobs = np.full_like(logprobs, np.nan)
        return replace(response, token_ids=response.token_ids[:room], logprobs=logprobs)

    return replace(pair, prompt=prompt, chosen=cut(pair.chosen), rejected=cut(pair.rejected))


def _check_trainable(pairs: Sequence[Pair], params: TrainParams) -> None:
    has_bonus = params.has_bonus and params.kappa != 0
    is_refused = params.target_ratio if has_bonus else not params.nll_weight
    if is_refused and all(pair.tie for pair in pairs):
        raise UserError(
            f"all {len(pairs)} pairs are ties: the preference loss is 0, which sets no κ, and "
            "without a bonus nothing would be learnt",
            "use an oracle that tells responses apart, sample more responses per prompt, or set "
            "train.design and train.kappa",
        )


def _pair(index: int, row: dict[str, Any]) -> Pair:
    return Pair(
        index=index,
        prompt_id=row["prompt_id"],
        prompt=np.array(row["prompt_token_ids"], np.int32),
        chosen=_response(row, "chosen"),
        rejected=_response(row, "rejected"),
        tie=row["tie"],
    )


def _response(row: dict[str, Any], side: str) -> Response:
    return Response(
        token_ids=np.array(row[f"{side}_token_ids"], np.int32),
        logprobs=np.array(row[f"{side}_logprobs"], np.float32),
        score=row[f"{side}_score"],
    )


RefLogprobs = dict[int, tuple[np.ndarray, np.ndarray]]
"""Per-token log π_ref by `Pair.index`: of the chosen and of the rejected response."""


def padded_logprobs(pairs: Sequence[Pair], logprobs: RefLogprobs) -> Tensor:
    """Log-probabilities of the pairs' tokens, zero if there is none, [2B, S]."""
    rows = [torch.from_numpy(logprobs[pair.index][side]) for side in (0, 1) for pair in pairs]
    return pad_sequence(rows, batch_first=True)
