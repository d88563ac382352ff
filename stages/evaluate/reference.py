"""log π_ref of given responses.

Shapes: ``R`` responses, ``B`` sequences of a pass, ``T`` their padded length, ``N`` response tokens
of a pass.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from stages.contract.errors import UserError
from stages.contract.number_types import NumberType
from stages.evaluate.params import EvaluateParams
from stages.harness.context import ModelSource, StageContext
from stages.modeling.load import load_causal_lm, load_config
from stages.modeling.logprobs import ResponseLogprobs
from stages.modeling.probe import UnfitModelError, check_logprobs, require_static_rope
from stages.modeling.process_pool import DevicePool
from stages.modeling.token_batches import token_batches
from stages.training.batches import Example, padded_rows

TokenIds = Sequence[npt.NDArray[np.int32]]
Pass = tuple[TokenIds, TokenIds]
"""Prompts and responses of one forward pass."""
BATCH_TOKENS = 16384
"""Most tokens, padding included, in one forward pass; a longer sequence makes a pass alone."""
_REMEDY = "set `evaluate.log_pi_ref: off`"


class Reference:
    """The reference of the request, one on each device of the stage."""

    def __init__(self, ctx: StageContext[EvaluateParams]) -> None:
        source = ctx.model("reference")
        self._config = load_config(source)
        self._place = source.name_or_path
        self._dtype = ctx.params.dtype
        self._models: DevicePool[Pass, npt.NDArray[np.float64]] = DevicePool(
            partial(_Model, source, ctx.params.dtype), ctx.request.resources
        )

    def log_probabilities(self, prompts: TokenIds, responses: TokenIds) -> npt.NDArray[np.float64]:
        """Sums log π_ref over the tokens of each response, at temperature 1: [R] float64.

        A prompt has at least one token; an empty response has log-probability 0.

        Raises:
            UserError: The reference's vocabulary lacks a token, a sequence exceeds its context, or
                the model returns a log-probability that is NaN.
        """
        sums = np.zeros(len(prompts), dtype=np.float64)
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        require_static_rope(
            self._config,
            self._place,
            longest=max(lengths, default=0),
            remedy=_REMEDY,
        )
        batches = list(token_batches(lengths, BATCH_TOKENS))
        passes = (
            ([prompts[row] for row in rows], [responses[row] for row in rows]) for rows in batches
        )
        for rows, pass_sums in zip(batches, self._models.map(passes), strict=True):
            sums[rows] = pass_sums
        if np.isnan(sums).any():
            raise UserError(
                f"log-probabilities of {self._place} are not numbers in {self._dtype}",
                "set evaluate.dtype to bfloat16 or float32",
            )
        return sums

    def close(self) -> None:
        """Ends the processes of the devices."""
        self._models.close()


class _Model:
    """The reference, loaded in one process; called with a pass, it sums each row's log π_ref."""

    def __init__(self, source: ModelSource, dtype: NumberType) -> None:
        model = load_causal_lm(source, dtype=dtype)
        try:
            check_logprobs(model)
        except UnfitModelError as error:
            raise UserError(
                f"log-probabilities of {source.name_or_path} cannot be computed: {error}", _REMEDY
            ) from error
        self._device = model.device
        self._logprobs = ResponseLogprobs(model)
        self._vocabulary = model.get_output_embeddings().weight.shape[0]

    @torch.inference_mode()
    def __call__(self, rows: Pass) -> npt.NDArray[np.float64]:
        prompts, responses = rows
        highest = max((int(ids.max()) for ids in [*prompts, *responses] if len(ids)), default=0)
        if highest >= self._vocabulary:
            raise UserError(
                f"the samples hold token {highest}, the reference has {self._vocabulary} tokens",
                "use a reference with the policy's tokenizer",
            )
        padded = padded_rows(list(map(Example, prompts, responses)))
        logprobs = padded.to(self._device).logprobs(self._logprobs)
        token_logprobs = logprobs.double().cpu().numpy()
        owners = np.repeat(np.arange(len(prompts)), [len(response) for response in responses])
        return np.bincount(owners, weights=token_logprobs, minlength=len(prompts)).astype(
            np.float64, copy=False
        )
