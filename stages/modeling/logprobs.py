"""Log-probabilities of response tokens, without a `[B, T, V]` tensor.

Only the positions that predict a response token are projected onto the vocabulary, a chunk at a
time; the backward pass computes the chunks again unless they are small.

Shapes: `R` rows, `T` tokens of a row, `N` response tokens of all rows, `H` width, `V` vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stages.modeling.shared_prefix import Group, RowLayout

LOGIT_CHUNK_BYTES = 64 << 20
"""Size of one chunk of float32 logits: large enough to keep a matrix multiplication busy."""
FEWEST_ROWS = {True: 1024, False: 1}
"""Fewest rows of a chunk on a GPU, and on a CPU. A GPU reads all of the head's weights for each
chunk: with a vocabulary of 128k, 64 MiB are 130 rows, too few to hide that."""
LOGIT_KEEP_BYTES = 256 << 20
"""Logits of a forward pass that are kept for the backward pass rather than computed again."""


@dataclass(frozen=True)
class LogitMap:
    """Map of the logits x of a model's head: ``cap · tanh(factor · x / divisor / cap)``."""

    factor: float = 1.0
    """Cohere's `logit_scale`; 1 leaves them as they are."""
    divisor: float = 1.0
    """Granite's `logits_scaling`; 1 leaves them as they are."""
    cap: float | None = None
    """`final_logit_softcapping` of Gemma 2 and nanochat; None caps nothing."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """The map that a model's configuration names."""
        config = model.config.get_text_config()
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        factor, divisor, cap = (getattr(config, name, None) for name in names)
        return cls(factor or 1.0, divisor or 1.0, cap)

    def apply_(self, logits: Tensor) -> Tensor:
        """Maps logits in place, in the order in which the models do."""
        if self.factor != 1:
            logits.mul_(self.factor)
        if self.divisor != 1:
            logits.div_(self.divisor)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    @property
    def scale(self) -> float:
        """Derivative of the map at 0."""
        return self.factor / self.divisor

    def curve(self, mapped: Tensor) -> Tensor | None:
        """Derivative at logits that are mapped already, divided by ``scale``; None if it is 1."""
        return None if self.cap is None else 1 - (mapped / self.cap).square_()


class ResponseLogprobs(nn.Module):
    """A causal language model whose forward pass gives the log-probabilities of given tokens.

    A module of its own, so that wrappers (DDP, DeepSpeed) see one forward pass and ZeRO-3 gathers
    the head's weight once for all chunks. A peft model may be around the policy.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        head = causal_lm(policy).get_output_embeddings()
        assert type(head) is nn.Linear, "checked by check_logprobs, and no adapter is on it"
        self.head = _ChunkedHead(head, LogitMap.of(causal_lm(policy)))

    def forward(
        self,
        input_ids: Tensor,
        source_index: Tensor,
        targets: Tensor,
        groups: tuple[Group, ...] | None = None,
    ) -> Tensor:
        """Computes log π of the targets.

        Args:
            input_ids: Rows padded on the right, [R, T]. Under a causal mask no real token sees
                the padding, so none is masked. With ``groups`` one row without padding, [1, T].
            source_index: Places in the flattened rows whose output predicts a target, [N].
            targets: Token ids, [N].
            groups: Lengths of the prompts and responses that lie one after the other in the row,
                each prompt shared by the responses after it; the model must have been loaded with
                the attention ``SHARED_PREFIX``.

        Returns:
            Float32 log-probabilities at temperature 1, [N].
        """
        # Looked up per call: peft replaces layers inside the decoder.
        decoder = causal_lm(self.policy).get_decoder()
        options: dict[str, Any] = {}
        if groups is not None:
            layout = RowLayout(groups)
            options = {"position_ids": layout.position_ids(input_ids.device), "row_layout": layout}
        hidden = decoder(input_ids=input_ids, use_cache=False, **options).last_hidden_state
        return self.head(hidden.flatten(0, 1).index_select(0, source_index), targets)


def causal_lm(policy: nn.Module) -> Any:
    """The Hugging Face model itself, also if peft wrapped it."""
    inner = getattr(policy, "base_model", None)
    if inner is not None and type(policy).__module__.startswith("peft."):
        return inner.model
    return policy


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mapped: LogitMap = LogitMap(),
    *,
    chunk_bytes: int = LOGIT_CHUNK_BYTES,
    chunk_rows: int | None = None,
    keep_bytes: int = LOGIT_KEEP_BYTES,
) -> Tensor:
    """Computes log softmax(mapped(hidden · weightᵀ + bias))[targets] in float32.

    Args:
        hidden: Last hidden states, [N, H].
        weight: The head's weight, [V, H].
        bias: The head's bias, [V], or None.
        targets: Token ids, [N].
        mapped: What the model makes of the head's logits.
        chunk_bytes: Memory that one chunk of float32 logits may take.
        chunk_rows: Fewest rows of a chunk, whatever memory they take; see `FEWEST_ROWS`.
        keep_bytes: See `LOGIT_KEEP_BYTES`.

    Returns:
        Log-probabilities, [N].
    """
    if is_fused(weight, bias, mapped):
        # Triton comes with torch's builds for GPUs alone.
        from stages.modeling.fused_logprobs import fused_logprobs

        return fused_logprobs(hidden, weight, targets, mapped.scale)
    row_bytes = 4 * weight.shape[0]
    fewest = FEWEST_ROWS[weight.is_cuda] if chunk_rows is None else chunk_rows
    chunk = max(fewest, chunk_bytes // row_bytes)
    keep = hidden.shape[0] * row_bytes <= keep_bytes
    return _TokenLogprobs.apply(hidden, weight, bias, targets, mapped, chunk, keep)


def is_fused(weight: Tensor, bias: Tensor | None, mapped: LogitMap) -> bool:
    """True if kernels compute the softmax: on a GPU, unless logits are capped or have a bias."""
    return weight.is_cuda and bias is None and mapped.cap is None


class _ChunkedHead(nn.Module):
    """Shares the parameters of a model's head, so that hooks on parameters find them here too."""

    def __init__(self, head: nn.Linear, mapped: LogitMap) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias: Tensor | None = head.bias
        self._mapped = mapped

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(hidden, self.weight, self.bias, targets, self._mapped)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax at the targets; ∂/∂logits = (onehot(target) − softmax(logits)) · the map's slope.

    What the backward pass needs of the logits is kept if it is small, and computed again if
    it is not. Where the head is frozen it is not needed: the forward pass then computes ∂/∂hidden
    of each log-probability, one product in place of two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        mapped: LogitMap,
        chunk: int,
        keep: bool,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        frozen = wants_hidden and not (wants_weight or wants_bias)
        # The slope of a cap needs the logits themselves.
        keep = keep and (wants_weight or wants_bias) and mapped.cap is None
        kind = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        log_normalizers = torch.empty_like(logprobs)
        d_hidden = torch.empty_like(hidden) if frozen else None
        kept = []
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight = weight.to(dtype)
            cast_bias = None if bias is None else bias.to(dtype)
            for rows in _chunks(hidden.shape[0], chunk):
                scores = functional.linear(hidden[rows].to(dtype), cast_weight, cast_bias).float()
                mapped.apply_(scores)
                curve = None if d_hidden is None else mapped.curve(scores)
                chosen = scores.gather(1, targets[rows, None]).squeeze(1)
                largest = scores.amax(dim=1)
                # In place: a second tensor of this size costs more than the exponentials.
                scores.sub_(largest[:, None]).exp_()
                log_normalizers[rows] = largest + scores.sum(dim=1).log_()
                logprobs[rows] = chosen - log_normalizers[rows]
                if d_hidden is not None or keep:
                    scores.mul_((largest - log_normalizers[rows]).exp_()[:, None])
                if d_hidden is not None:
                    own = cast_weight[targets[rows]]
                    if curve is not None:
                        own = own * curve.gather(1, targets[rows, None]).to(dtype)
                        scores.mul_(curve)
                    found = own - scores.to(dtype) @ cast_weight
                    d_hidden[rows] = (found if mapped.scale == 1 else found * mapped.scale).to(
                        hidden.dtype
                    )
                if keep:
                    kept.append(scores)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizers, d_hidden)
        ctx.mapped = mapped
        ctx.chunk = chunk
        ctx.dtype = dtype
        ctx.kept = kept
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normalizers, d_hidden = ctx.saved_tensors
        if d_hidden is not None:
            scaled = d_hidden.float().mul_(gradient[:, None]).to(hidden.dtype)
            return scaled, None, None, None, None, None, None
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = ctx.dtype
        # Used up here; a second backward pass would compute them again.
        kept = ctx.kept
        ctx.kept = []
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight = weight.to(dtype)
            cast_bias = None if bias is None else bias.to(dtype)
            d_hidden = torch.empty_like(hidden) if wants_hidden else None
            # Summed over chunks in float32, whatever the dtype of the products.
            d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
            d_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
            for place, rows in enumerate(_chunks(hidden.shape[0], ctx.chunk)):
                inputs = hidden[rows].to(dtype)
                curve = None
                if kept:
                    d_logits = kept[place]
                    kept[place] = None
                else:
                    d_logits = functional.linear(inputs, cast_weight, cast_bias).float()
                    curve = ctx.mapped.curve(ctx.mapped.apply_(d_logits))
                    d_logits.sub_(log_normalizers[rows, None]).exp_()
                d_logits.mul_(-gradient[rows, None])
                d_logits.scatter_add_(1, targets[rows, None], gradient[rows, None])
                if curve is not None:
                    d_logits.mul_(curve)
                if ctx.mapped.scale != 1:
                    d_logits.mul_(ctx.mapped.scale)
                if d_bias is not None:
                    d_bias += d_logits.sum(dim=0)
                d_logits = d_logits.to(dtype)
                if d_hidden is not None:
                    d_hidden[rows] = (d_logits @ cast_weight).to(hidden.dtype)
                if d_weight is not None and dtype == d_weight.dtype:
                    d_weight.addmm_(d_logits.T, inputs)
                elif d_weight is not None:
                    d_weight += d_logits.T @ inputs
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *[None] * 4,
        )


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
