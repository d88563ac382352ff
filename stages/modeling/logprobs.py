"""Log-probabilities of response tokens, without a `[B, T, V]` tensor.

Only the positions that predict a response token are projected onto the vocabulary, a chunk at a
time; the backward pass computes the chunks again unless they are small. On a GPU the softmax of a
chunk is computed by the kernels of `fused_logprobs`.

Shapes: `R` rows, `T` tokens of a row, `N` response tokens of all rows, `H` width, `V` vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stages.modeling.shared_prefix import Group, RowLayout, product_dtype

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

    A separate module, so that wrappers (DDP, DeepSpeed) see one forward pass and ZeRO-3 gathers
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
    inner: Any = policy
    return inner.base_model.model if type(policy).__module__.startswith("peft.") else policy


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mapped: LogitMap = LogitMap(),
) -> Tensor:
    """Computes log softmax(mapped(hidden · weightᵀ))[targets] in float32.

    Args:
        hidden: Last hidden states, [N, H].
        weight: The head's weight, [V, H].
        targets: Token ids, [N].
        mapped: What the model makes of the head's logits.

    Returns:
        Log-probabilities, [N].
    """
    rows = len(hidden)
    dtype = product_dtype(hidden)
    is_trained = torch.is_grad_enabled() and weight.requires_grad
    if is_fused(weight, mapped):
        # Triton comes with torch's builds for GPUs alone.
        from stages.modeling.fused_logprobs import FusedSoftmax, chunk_rows, keeps

        softmax: Any = FusedSoftmax(mapped.scale)
        row_bytes = len(weight) * dtype.itemsize
        keep = is_trained and keeps(rows * row_bytes, weight.device)
        chunk = rows if keep else chunk_rows(row_bytes, weight.device)
    else:
        softmax = _Softmax(mapped)
        row_bytes = 4 * len(weight)
        keep = is_trained and rows * row_bytes <= LOGIT_KEEP_BYTES
        chunk = max(FEWEST_ROWS[weight.is_cuda], LOGIT_CHUNK_BYTES // row_bytes)
    return _TokenLogprobs.apply(hidden, weight, targets, softmax, dtype, chunk, keep)


def is_fused(weight: Tensor, mapped: LogitMap) -> bool:
    """True if kernels compute the softmax: on a GPU, unless logits are capped."""
    return weight.is_cuda and mapped.cap is None


class _ChunkedHead(nn.Module):
    """Shares the parameters of a model's head, so that hooks on parameters find them here too."""

    def __init__(self, head: nn.Linear, mapped: LogitMap) -> None:
        super().__init__()
        self.weight = head.weight
        self._mapped = mapped

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(hidden, self.weight, targets, self._mapped)


@dataclass(frozen=True)
class _Softmax:
    """Softmax of a chunk's logits by torch, in float32."""

    mapped: LogitMap

    def logprobs(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        """Log-probabilities of the targets, and what :meth:`gradient` needs."""
        scores = self.mapped.apply_(logits.float())
        curve = self.mapped.curve(scores)
        chosen = scores.gather(1, targets[:, None]).squeeze(1)
        largest = scores.amax(dim=1)
        # In place: a second tensor of this size costs more than the exponentials.
        scores.sub_(largest[:, None]).exp_()
        normalizers = largest + scores.sum(dim=1).log_()
        scores.mul_((largest - normalizers).exp_()[:, None])
        return chosen - normalizers, (scores, curve)

    def gradient(self, state: Any, targets: Tensor, gradient: Tensor) -> Tensor:
        """∂/∂logits = gradient · (onehot(target) − softmax(logits)) · the map's slope."""
        scores, curve = state
        scores.mul_(-gradient[:, None])
        scores.scatter_add_(1, targets[:, None], gradient[:, None])
        if curve is not None:
            scores.mul_(curve)
        if self.mapped.scale != 1:
            scores.mul_(self.mapped.scale)
        return scores


class _TokenLogprobs(torch.autograd.Function):
    """Log softmax at the targets, a chunk of logits at a time.

    What the backward pass needs of the logits is kept, or computed again. Where the head is frozen
    the backward pass needs none: the forward pass computes ∂/∂hidden of each log-probability.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softmax: Any,
        dtype: torch.dtype,
        chunk: int,
        keep: bool,
    ) -> Tensor:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden and not needs_head else None
        ctx.softmax = softmax
        ctx.dtype = dtype
        ctx.chunk = chunk
        ctx.kept = []
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            for rows in _chunks(len(hidden), chunk):
                logits = functional.linear(hidden[rows].to(dtype), head)
                logprobs[rows], state = softmax.logprobs(logits, targets[rows])
                if d_hidden is not None:
                    ones = torch.ones_like(logprobs[rows])
                    d_logits = softmax.gradient(state, targets[rows], ones).to(dtype)
                    d_hidden[rows] = (d_logits @ head).to(hidden.dtype)
                if keep:
                    ctx.kept.append(state)
        ctx.save_for_backward(hidden, weight, targets, d_hidden)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, d_hidden = ctx.saved_tensors
        if d_hidden is not None:
            scaled = d_hidden.float().mul_(gradient[:, None]).to(hidden.dtype)
            return scaled, *[None] * 6
        gradient = gradient.contiguous()
        # Used up here; a second backward pass would compute them again.
        kept = ctx.kept
        ctx.kept = []
        chunks = _chunks(len(hidden), ctx.chunk)
        # Sums over several chunks are float32, whatever the weight's dtype.
        sum_dtype = weight.dtype if len(chunks) == 1 else torch.float32
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros((), device=weight.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(ctx.dtype)
            for rows in chunks:
                inputs = hidden[rows].to(ctx.dtype)
                if kept:
                    state = kept.pop(0)
                else:
                    logits = functional.linear(inputs, head)
                    _, state = ctx.softmax.logprobs(logits, targets[rows])
                d_logits = ctx.softmax.gradient(state, targets[rows], gradient[rows])
                d_logits = d_logits.to(ctx.dtype)
                d_hidden[rows] = (d_logits @ head).to(hidden.dtype)
                part = _product(d_logits.T, inputs, sum_dtype)
                d_weight = part if rows.start == 0 else d_weight.add_(part)
        return d_hidden, d_weight.to(weight.dtype), *[None] * 5


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product in a dtype; on a GPU it is summed in float32 inside."""
    if left.dtype == dtype or not left.is_cuda:
        return (left @ right).to(dtype)
    return torch.mm(left, right, out_dtype=dtype)


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
