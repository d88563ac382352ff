"""log π_ref of given responses.

Shapes: ``R`` responses, ``B`` sequences of a pass, ``T`` their padded length, ``N`` response tokens
of a pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from stages.contract.errors import UserError
from stages.evaluate.params import EvaluateParams
from stages.harness.context import StageContext
from stages.modeling.load import load_causal_lm
from stages.modeling.logprobs import ResponseLogprobs
from stages.modeling.probe import UnfitModelError, check_logprobs, require_static_rope
from stages.modeling.token_batches import token_batches
from stages.training.batches import Example, padded_rows

BATCH_TOKENS = 16384
"""Most tokens, padding included, in one forward pass; a longer sequence makes a pass alone."""
_REMEDY = "set `evaluate.log_pi_ref: off`"


class Reference:
    """The reference of the request, loaded."""

    def __init__(self, ctx: StageContext[EvaluateParams]) -> None:
        source = ctx.model("reference")
        self._place = source.name_or_path
        self._dtype = ctx.params.dtype
        model = load_causal_lm(source, dtype=ctx.params.dtype)
        self._model = model
        try:
            check_logprobs(model)
        except UnfitModelError as error:
            raise UserError(
                f"log-probabilities of {source.name_or_path} cannot be computed: {error}", _REMEDY
            ) from error
        self._logprobs = ResponseLogprobs(model)
        self._vocabulary = model.get_output_embeddings().weight.shape[0]

    def log_probabilities(self, rows: pa.RecordBatch) -> npt.NDArray[np.float64]:
        """Sums log π_ref over the tokens of each response, at temperature 1: [R] float64.

        A prompt has at least one token; an empty response has log-probability 0.

        Raises:
            UserError: The reference's vocabulary lacks a token, a sequence exceeds its context, or
                the model returns a log-probability that is NaN.
        """
        examples = []
        tokens = zip(rows["prompt_token_ids"], rows["response_token_ids"], strict=True)
        for prompt, response in tokens:
            examples.append(Example(prompt.values.to_numpy(), response.values.to_numpy()))
        lengths = [example.row_tokens for example in examples]
        require_static_rope(
            self._model.config,
            self._place,
            longest=max(lengths),
            remedy=_REMEDY,
        )
        sums = np.zeros(len(examples), dtype=np.float64)
        for places in token_batches(lengths, BATCH_TOKENS):
            sums[places] = self._sums([examples[place] for place in places])
        if np.isnan(sums).any():
            raise UserError(
                f"log-probabilities of {self._place} are not numbers in {self._dtype}",
                "set evaluate.dtype to bfloat16 or float32",
            )
        return sums

    @torch.inference_mode()
    def _sums(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Sums of one forward pass."""
        rows = padded_rows(examples)
        highest = int(rows.input_ids.max())
        if highest >= self._vocabulary:
            raise UserError(
                f"the samples hold token {highest}, the reference has {self._vocabulary} tokens",
                "use a reference with the policy's tokenizer",
            )
        logprobs = rows.to(self._model.device).logprobs(self._logprobs)
        token_logprobs = logprobs.double().cpu().numpy()
        lengths = [len(example.response) for example in examples]
        owners = np.repeat(np.arange(len(examples)), lengths)
        return np.bincount(owners, weights=token_logprobs, minlength=len(examples))
