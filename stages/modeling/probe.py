"""Checks of a loaded model and its rotary embeddings: what would go wrong unnoticed is refused.

Models of transformers differ in what they do with padding, with arguments that they do not know, in
training mode, and behind the head. Each check compares two ways to compute the same values.

Shapes: `R` rows, `T` tokens of a row, `N` response tokens of all rows, `H` width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from stages.contract.errors import UserError
from stages.modeling.logprobs import LogitMap
from stages.modeling.shared_prefix import (
    SHARED_PREFIX,
    Group,
    RowLayout,
    product_dtype,
    supports_shared_prefix,
)

_GROUPS: tuple[Group, ...] = ((3, 2, 4), (2, 3, 1))
# The same tokens as a row for each response, and the places that predict a response's tokens.
_ROWS = ((0, 1, 2, 3, 4), (0, 1, 2, 5, 6, 7, 8), (9, 10, 11, 12, 13), (9, 10, 14))
_PADDED_PLACES = [2, 3, 9, 10, 11, 12, 15, 16, 17, 22]
_PACKED_PLACES = [2, 3, 2, 5, 6, 7, 10, 11, 12, 10]
# Sliding windows are shortened to this, so that rows as short as these show whether one is kept.
_WINDOW = 2
# Relative differences of hidden states; in 16 bits rounding grows over the layers.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# The same kernels on the same shapes: only the order of atomic additions may differ.
_RANDOM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.02}


class UnfitModelError(ValueError):
    """A model's log-probabilities would be wrong; the message says why."""


def check_logprobs(model: Any) -> None:
    """Checks that log-probabilities can be read off a linear head, whatever lies next to a row."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise UnfitModelError(
            f"its head is of type {type(head).__name__}, not a linear layer without bias"
        )
    if _is_sharded(model):
        return
    with _evaluating(model), _errors_named():
        ids = _padded_rows(model)
        padded = _hidden(model, input_ids=ids)
        logits = model(input_ids=ids, use_cache=False).logits
        if not torch.equal(logits.float(), LogitMap.of(model).apply_(head(padded)).float()):
            raise UnfitModelError(
                "its logits are changed after the head, and not by the cap or the scale that its "
                "configuration names"
            )
        # The shortest row has the most padding; alone it has none.
        length = len(_ROWS[-1])
        alone = _hidden(model, input_ids=ids[-1:, :length])
        if not _gap(padded[-1:, :length], alone).median() <= _TOLERANCE[product_dtype(padded)]:
            raise UnfitModelError("a token's output depends on the tokens after it")


def check_training_mode(model: Any) -> None:
    """Checks that a model computes in training mode what it computes in evaluation mode."""
    if _is_sharded(model):
        return
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _evaluating(model), _errors_named():
        ids = _padded_rows(model)
        expected = _hidden(model, input_ids=ids)
        model.train()
        trained = _hidden(model, input_ids=ids)
    if not _gap(trained, expected).max() <= _RANDOM_TOLERANCE[product_dtype(expected)]:
        raise UnfitModelError(
            "it computes something else in training mode (random routing, say): policy and "
            "reference would differ at the first step"
        )


def share_prompts(model: Any) -> None:
    """Sets the attention of packed rows, and checks that they are computed as padded ones."""
    if not supports_shared_prefix(model):
        raise UnfitModelError(f"{type(model).__name__} has its own attention")
    if _is_sharded(model):
        return
    with _evaluating(model), _short_windows(model), _errors_named():
        padded = _hidden(model, input_ids=_padded_rows(model)).flatten(0, 1)[_PADDED_PLACES]
        model.set_attn_implementation(SHARED_PREFIX)
        if model.config.get_text_config()._attn_implementation != SHARED_PREFIX:
            raise UnfitModelError(f"{type(model).__name__} keeps its own attention")
        layout = RowLayout(_GROUPS)
        ids = _tokens(model)[None]
        positions = layout.position_ids(model.device)
        packed = _hidden(model, input_ids=ids, position_ids=positions, row_layout=layout)
    # Nothing comes before the first response but its prompt: it is right in any model.
    others = _gap(packed[0, _PACKED_PLACES], padded)[_GROUPS[0][1] :]
    if not others.median() <= _TOLERANCE[product_dtype(packed)]:
        raise UnfitModelError(
            "its layers lose the layout of the row or a sliding window on the way to the "
            "attention, and responses would see what is not theirs"
        )


def _hidden(model: Any, **inputs: Any) -> Tensor:
    """Last hidden states as :class:`stages.modeling.logprobs.ResponseLogprobs` reads them."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or decoder is model:
        raise UnfitModelError(
            f"{type(model).__name__} names no decoder whose output its head reads"
        )
    return decoder(use_cache=False, **inputs).last_hidden_state


def _padded_rows(model: Any) -> Tensor:
    """A row for each response, [R, T]."""
    tokens = _tokens(model)
    return pad_sequence([tokens[list(row)] for row in _ROWS], batch_first=True)


def _tokens(model: Any) -> Tensor:
    """Tokens spread over the vocabulary: one may say nothing, as padding with an embedding of 0."""
    weight = model.get_input_embeddings().weight
    # Under ZeRO-3 the weight's own shape is empty; `ds_shape` is the whole weight's.
    vocabulary = getattr(weight, "ds_shape", weight.shape)[0]
    return torch.linspace(0, vocabulary - 1, sum(map(sum, _GROUPS)), device=model.device).long()


def _gap(hidden: Tensor, expected: Tensor) -> Tensor:
    """Relative difference of hidden states, [..., H] to [...].

    Its median over tokens represents a row: in 16 bits a router may send a token elsewhere for the
    last digit of a score.
    """
    hidden = hidden.float()
    expected = expected.float()
    return (hidden - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-12)


def _is_sharded(model: nn.Module) -> bool:
    """True if ZeRO-3 has sharded the weights, and no engine gathers them layer by layer yet."""
    # DeepSpeed names its modules when it sets the hooks that gather.
    return not hasattr(model, "ds_id") and any(
        hasattr(weight, "ds_id") for weight in model.parameters()
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Shortens sliding windows, in layers and in the configuration that masks are made from."""
    places = [vars(owner) for owner in (*model.modules(), model.config.get_text_config())]
    windows = [(place, place["sliding_window"]) for place in places if place.get("sliding_window")]
    for place, _ in windows:
        place["sliding_window"] = _WINDOW
    try:
        yield
    finally:
        for place, window in windows:
            place["sliding_window"] = window


@contextmanager
def _errors_named() -> Iterator[None]:
    """Turns what a model's code raises on a probe into the reason why it cannot be used."""
    try:
        yield
    except (UnfitModelError, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise UnfitModelError(f"{type(error).__name__}: {lines[0]}") from error


def require_static_rope(config: Any, place: str, *, longest: int, remedy: str) -> None:
    """Checks that no sequence passes the context, or changes its neighbours' embeddings.

    Past the context a model without a place for the token crashes, another one answers at positions
    that it never saw, and ``dynamic`` rotary embeddings change for good. ``longrope`` (Phi-3) takes
    other frequencies for a whole batch once one of its sequences passes the original context.

    ``{limit}`` in the remedy becomes the most tokens that are safe.
    """
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise UserError(
            f"a sequence has {longest} tokens, and the context of {place} is {context}",
            remedy.format(limit=context),
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set for all layers, or one for each type of layer.
    nested = [parameter for parameter in parameters.values() if isinstance(parameter, dict)]
    for rope in nested or [parameters]:
        limit = rope.get("original_max_position_embeddings", longest)
        if rope.get("rope_type") == "longrope" and longest > limit:
            raise UserError(
                f"a sequence has {longest} tokens; above {limit} the rotary embedding of {place} "
                "(longrope) changes for all sequences of a batch, and so do their "
                "log-probabilities",
                remedy.format(limit=limit),
            )
