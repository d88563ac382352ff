"""log π_ref of given responses, and the perplexity of a text that training does not aim at.

Its rise shows what a policy loses elsewhere while the reward rises.

Shapes: ``R`` responses, ``B`` sequences of a pass, ``T`` their padded length, ``N`` response tokens
of a pass.
"""

import math
from collections.abc import Sequence
from contextlib import closing
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
from stages.modeling.tokenizers import load_tokenizer
from stages.training.batches import Example, padded_rows

TokenIds = Sequence[npt.NDArray[np.int32]]
Pass = tuple[TokenIds, TokenIds]
"""Prompts and responses of one forward pass."""
BATCH_TOKENS = 16384
"""Most tokens, padding included, in one forward pass; a longer sequence makes a pass of its own."""
_NO_TEXT = "shorten the passages of inputs.perplexity_text, or leave it out"


class Reference:
    """A model of the request, one on each device of the stage; by default its reference.

    The remedy is what a person does to do without its log-probabilities.
    """

    def __init__(
        self,
        ctx: StageContext[EvaluateParams],
        name: str = "reference",
        remedy: str = "set `evaluate.log_pi_ref: off`",
    ) -> None:
        source = ctx.model(name)
        self._config = load_config(source)
        self._place = source.name_or_path
        self._dtype = ctx.params.dtype
        self._remedy = remedy
        self._models: DevicePool[Pass, npt.NDArray[np.float64]] = DevicePool(
            partial(_Model, source, ctx.params.dtype, remedy), ctx.request.resources
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
            remedy=self._remedy,
        )
        batches = list(token_batches(lengths, BATCH_TOKENS))
        passes = (
            [[each[row] for row in rows] for each in (prompts, responses)] for rows in batches
        )
        found = self._models.map((each[0], each[1]) for each in passes)
        for rows, of_rows in zip(batches, found, strict=True):
            sums[rows] = of_rows
        if np.isnan(sums).any():
            raise UserError(
                f"log-probabilities of {self._place} are no numbers in {self._dtype}",
                "set evaluate.dtype to bfloat16 or float32",
            )
        return sums

    def close(self) -> None:
        """Ends the processes of the devices."""
        self._models.close()


class _Model:
    """The reference, loaded in one process; called with a pass, it sums each row's log π_ref."""

    def __init__(self, source: ModelSource, dtype: NumberType, remedy: str) -> None:
        model = load_causal_lm(source, dtype=dtype)
        try:
            check_logprobs(model)
        except UnfitModelError as error:
            raise UserError(
                f"log-probabilities of {source.name_or_path} cannot be computed: {error}", remedy
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
        padded = padded_rows([Example(*each) for each in zip(prompts, responses, strict=True)])
        logprobs = padded.to(self._device).logprobs(self._logprobs)
        token_logprobs = logprobs.double().cpu().numpy()
        owners = np.repeat(np.arange(len(prompts)), [len(each) for each in responses])
        return np.bincount(owners, weights=token_logprobs, minlength=len(prompts)).astype(
            np.float64, copy=False
        )


def perplexities(ctx: StageContext[EvaluateParams]) -> dict[str, float]:
    """``perplexity`` and ``base_perplexity`` of the input ``text``.

    The text's passages stand between blank lines. The perplexity is exp of the mean negative
    log-probability of a token, over all tokens but the first of each passage.

    Raises:
        UserError: The text has no passage of two tokens, or a model cannot score it.
    """
    passages = _passages(ctx)
    return {
        name: _perplexity(ctx, model, passages)
        for name, model in (("perplexity", "policy"), ("base_perplexity", "reference"))
    }


def _passages(ctx: StageContext[EvaluateParams]) -> TokenIds:
    path = ctx.path("text")
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise UserError(f"{path} is no text in UTF-8: {error}", "write it anew") from error
    tokenizer = load_tokenizer(ctx.model("reference"))
    written = [each.strip() for each in text.split("\n\n")]
    tokens = [np.array(tokenizer(each)["input_ids"], dtype=np.int32) for each in written if each]
    found = [each for each in tokens if len(each) > 1]
    if not found:
        raise UserError(
            f"{path} has no passage of two tokens", "write passages with blank lines between them"
        )
    return found


def _perplexity(ctx: StageContext[EvaluateParams], model: str, passages: TokenIds) -> float:
    with closing(Reference(ctx, model, _NO_TEXT)) as scorer:
        sums = scorer.log_probabilities(
            [each[:1] for each in passages], [each[1:] for each in passages]
        )
    return math.exp(-math.fsum(sums) / sum(len(each) - 1 for each in passages))
