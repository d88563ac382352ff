"""Perplexity of a text that training does not aim at, under the policy and under its base.

Its rise shows what a policy loses elsewhere while the reward rises.
"""

import math
from contextlib import closing

import numpy as np

from stages.contract.errors import UserError
from stages.evaluate.params import EvaluateParams
from stages.evaluate.reference import Reference, TokenIds
from stages.harness.context import StageContext
from stages.modeling.tokenizers import load_tokenizer

_REMEDY = "leave inputs.perplexity_text out"


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
        raise UserError(f"{path} is no text in UTF-8: {error}", _REMEDY) from error
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
    params = ctx.params
    scorer = Reference(
        ctx.model(model), params.dtype, params.batch_tokens, ctx.request.resources, _REMEDY
    )
    with closing(scorer):
        sums = scorer.log_probabilities(
            [each[:1] for each in passages], [each[1:] for each in passages]
        )
    return math.exp(-math.fsum(sums) / sum(len(each) - 1 for each in passages))
