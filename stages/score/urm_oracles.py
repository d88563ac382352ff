"""The oracles ``urm_gated`` and ``urm_helpfulness``: two readings of the URM reward model.

``urm_gated`` is the score by the model's card. ``urm_helpfulness`` is the helpfulness mean, which a
plain sequence classifier reads from the same checkpoint as its first output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from stages.contract.context import ModelSource, StageContext
from stages.contract.errors import UserError
from stages.modeling.chat import require_chat_template
from stages.modeling.device_pool import DevicePool
from stages.modeling.load import Precision, context_tokens, load_config, load_exactly
from stages.modeling.tokenizers import load_tokenizer
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams
from stages.score.reward_model import Classifier, RewardModel
from stages.score.urm import ATTRIBUTES, UrmModel, UrmOutput

_READINGS: dict[str, Callable[[UrmOutput], Tensor]] = {
    "urm_gated": lambda output: output.scores,
    "urm_helpfulness": lambda output: output.means[:, ATTRIBUTES.index("helpfulness")],
}


def load(ctx: StageContext[ScoreParams]) -> RewardModel:
    """Loads the URM checkpoint given as input ``model``, to be read as the parameters say.

    Raises:
        UserError: It is no URM checkpoint, or its tokenizer has no chat template or no BOS.
    """
    source, settings, oracle = ctx.model("model"), ctx.params.urm, ctx.params.oracle
    tokenizer = _load_tokenizer(source)
    limit = context_tokens(load_config(source), settings.max_length_tokens, source)
    load_one = partial(load_classifier, source, settings.dtype, oracle)
    return RewardModel(
        classifiers=DevicePool(load_one, ctx.resources),
        tokenizer=tokenizer,
        identity=f"{oracle}:{ctx.inputs['model'][0].source.digest[:80]}",
        max_length_tokens=limit,
        tokens_per_batch=settings.tokens_per_batch,
        one_bos=True,
    )


def load_classifier(source: ModelSource, dtype: Precision, oracle: str) -> Classifier:
    """Loads the model, to be read as the oracle of that name does.

    Raises:
        UserError: It is no URM checkpoint.
    """
    reading = _READINGS[oracle]
    return Classifier(
        model=load_exactly(UrmModel, source, dtype=dtype),
        # The model finds the last token by the mask: any id pads.
        pad_id=0,
        read=lambda output: to_verdicts(output, reading),
    )


def load_urm(source: ModelSource, dtype: Precision) -> tuple[Any, Any]:
    """Loads model and tokenizer.

    Raises:
        UserError: As for :func:`load`.
    """
    tokenizer = _load_tokenizer(source)
    return load_exactly(UrmModel, source, dtype=dtype), tokenizer


def _load_tokenizer(source: ModelSource) -> Any:
    tokenizer = load_tokenizer(source)
    require_chat_template(tokenizer, source.name_or_path)
    if tokenizer.bos_token_id is None:
        raise UserError(
            f"the tokenizer of {source.name_or_path} has no BOS token, which URM was trained with",
            "use the tokenizer of the reward model's own checkpoint",
        )
    return tokenizer


def to_verdicts(output: UrmOutput, reading: Callable[[UrmOutput], Tensor]) -> list[Verdict]:
    """One verdict for each conversation of a batch, with means and gate weights beside it."""
    names = (*ATTRIBUTES, *(f"gate_{name}" for name in ATTRIBUTES))
    rows = zip(reading(output).tolist(), output.means.tolist(), output.gates.tolist(), strict=True)
    verdicts = []
    for score, means, gates in rows:
        components = dict(zip(names, (*means, *gates), strict=True))
        if all(map(math.isfinite, (score, *components.values()))):
            verdicts.append(Verdict(score, components=components))
        else:
            verdicts.append(Verdict(None, f"the reward model gave {score} from {components}"))
    return verdicts
