"""Engine of a training: model, optimizer and schedule in one process, or in several.

Several keep the model whole under torch's DDP, or in shards by DeepSpeed, in the subclass
`zero.ZeroEngine`.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from transformers import get_scheduler

from stages.contract.errors import StoppedError
from stages.contract.events import Emitter
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.training.batches import ROWS, Plan, Rows, Sample
from stages.training.policy import Numerics

_FILE = "engine.pt"
_ADAM_BETAS = (0.9, 0.999)
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


@dataclass(frozen=True)
class Process:
    """One of the processes that train together."""

    rank: int
    local_rank: int
    """Its number among the processes of its node, from 0; the number of its GPU."""
    world_size: int
    events: Emitter
    """Receiver of its reports; only rank 0's is read."""
    stop_requested: Callable[[], bool]
    """True once SIGTERM came."""

    @property
    def is_first(self) -> bool:
        """True in the process that writes files and reports."""
        return self.rank == 0

    def check_stop(self, *, everywhere: bool = False) -> None:
        """Raises StoppedError if SIGTERM came; for places where nothing needs to be saved.

        The signal to any process counts if all look ``everywhere``, which is a collective call.
        """
        stop = self.stop_requested()
        if any(self.gathered(stop)) if everywhere else stop:
            raise StoppedError("asked to stop (SIGTERM)")

    def sum(self, values: Any) -> Any:
        """A tensor added up over all processes, in place; a collective call."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, in all; a collective call."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Waits for the other processes."""
        if self.world_size > 1:
            dist.barrier()


class Engine:
    """A model that is trained by torch alone; gradients are averaged over processes."""

    def __init__(
        self,
        model: ResponseLogprobs,
        plan: Plan[Any],
        numerics: Numerics,
        process: Process,
    ) -> None:
        self.model = model
        self.device = numerics.device
        self._numerics = numerics
        self._process = process
        params = plan.params
        # No norm is above infinity: the gradient stays as it is.
        self._max_grad_norm = params.max_grad_norm or float("inf")
        self.optimizer = AdamW(
            [weight for weight in model.parameters() if weight.requires_grad],
            lr=params.learning_rate,
            betas=_ADAM_BETAS,
            eps=params.adam_epsilon,
            weight_decay=0.0,
            fused=True,
        )
        self._plan = plan
        self._wrapped: Any = self._wrap()
        schedule: Any = get_scheduler(
            _SCHEDULES[params.lr_schedule],
            self.optimizer,
            num_warmup_steps=math.ceil(params.warmup_ratio * plan.num_steps),
            num_training_steps=plan.num_steps,
        )
        [self._share_of_rate] = schedule.lr_lambdas
        if plan.num_steps == 1 and params.warmup_ratio:
            process.events.warning(
                f"nothing is learnt: the only step is one of warm-up, with a learning rate of 0 "
                f"(warmup_ratio {params.warmup_ratio:g}); set warmup_ratio to 0, or take more steps"
            )

    def rows(self, samples: Sequence[Sample]) -> Rows:
        """Samples as the forward pass takes them, on the engine's device."""
        return ROWS[self._plan.params.row_layout](samples).to(self.device)

    def logprobs(self, rows: Rows) -> Tensor:
        """Log π of the response tokens of rows on the engine's device: [N]."""
        with self._numerics.forward_context():
            return rows.logprobs(self._wrapped)

    def train(self) -> None:
        """Sets the model to training."""
        self._wrapped.train()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Block of a micro-batch's passes; gradients are averaged in a step's last one."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of a micro-batch's loss."""
        loss.backward()

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (from 0)."""
        return self._plan.params.learning_rate * float(self._share_of_rate(step))

    def step(self, learning_rate: float) -> float | None:
        """Updates the weights.

        Returns:
            The norm of the gradient before it was clipped, if it is known.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._update()
        self._wrapped.zero_grad()
        return norm

    def save(self, folder: Path) -> None:
        """Writes trained weights and optimizer state; a collective call."""
        # Frozen weights are the base model's, which is loaded anyway.
        trained = {
            name: weight.detach()
            for name, weight in self.model.named_parameters()
            if weight.requires_grad
        }
        if self._process.is_first:
            state = {"model": trained, "optimizer": self.optimizer.state_dict()}
            torch.save(state, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Takes what :meth:`save` wrote, whatever number of processes did; a collective call."""
        state = torch.load(folder / _FILE, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])

    def whole_weights(self) -> dict[str, Tensor]:
        """The policy's weights by name, whole in the first process; a collective call.

        A policy with adapters gives the adapters alone.
        """
        weights: dict[str, Tensor] = {}
        # A weight of several names is gathered once, and stays one.
        gathered: dict[int, Tensor | None] = {}
        for name, share in self.model.policy.state_dict(keep_vars=True).items():
            if self._plan.params.lora.rank and not share.requires_grad:
                continue
            if id(share) not in gathered:
                gathered[id(share)] = self._whole(share)
            whole = gathered[id(share)]
            if whole is not None:
                weights[name] = whole
        return weights

    def _wrap(self) -> nn.Module:
        """The model that is called."""
        self.model.to(self.device)
        if self._process.world_size == 1:
            return self.model
        # DDP would wait for gradients of weights that text does not reach, as a vision tower's.
        policy = causal_lm(self.model.policy)
        reached = {*policy.get_decoder().parameters(), *self.model.head.parameters()}
        apart = [weight for weight in self.model.parameters() if weight not in reached]
        for weight in apart:
            weight.requires_grad_(False)
        if apart:
            self._process.events.info(f"{len(apart)} weights that no text reaches stay as they are")
        devices = [self._process.local_rank] if self.device.type == "cuda" else None
        # Or gradients would lie in memory twice.
        return DistributedDataParallel(self.model, device_ids=devices, gradient_as_bucket_view=True)

    def _update(self) -> float | None:
        norm = nn.utils.clip_grad_norm_(self._wrapped.parameters(), self._max_grad_norm)
        self.optimizer.step()
        return norm.item()

    def _whole(self, share: Tensor) -> Tensor | None:
        """A weight gathered from its shards; None in processes that need none."""
        return share.detach()
