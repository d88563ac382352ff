"""The training loop: one process, one device, float32 weights, resumable at any step."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.modeling.logprobs import ResponseLogprobs
from stages.sft.examples import Example, global_batches, micro_batches
from stages.sft.params import SftParams

Record = dict[str, float]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate_factor(step: int, num_steps: int, params: SftParams) -> float:
    """Share of the highest learning rate that step ``step`` (from 0) of ``num_steps`` uses."""
    num_warmup = math.ceil(params.warmup_ratio * num_steps)
    if step < num_warmup:
        return step / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    match params.lr_schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return 1 - progress
        case "constant":
            return 1.0


@dataclass
class Loop:
    """Minimises the mean negative log-likelihood of the response tokens of each global batch.

    Attributes:
        model: A causal language model of transformers, in float32 and on its device.
        examples: What to learn.
        params: The stage's parameters.
        seed: Of the order of the examples, and of dropout where the model has any.
        work: Folder of the checkpoint from which a later attempt goes on.
        stop_requested: Says whether to save and end; asked after every step.
        report: Called after every step with the step's number and values.
        autocast: Type of the forward pass's products, or None for float32.
    """

    model: Any
    examples: Sequence[Example]
    params: SftParams
    seed: int
    work: Path
    stop_requested: Callable[[], bool]
    report: Callable[[int, Record], None]
    autocast: torch.dtype | None = None
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._logprobs = ResponseLogprobs(self.model)
        self._parameters = dict(self.model.named_parameters())
        self._optimizer = _make_optimizer(self._parameters, self.params)
        self._state_path = self.work / "state.safetensors"
        self._saved_at = time.monotonic()

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all epochs."""
        params = self.params
        return params.epochs * math.ceil(len(self.examples) / params.global_batch_rows)

    def run(self) -> bool:
        """Trains until the end, or until asked to stop.

        Returns:
            Whether training came to its end; if not, its state is in ``work``.
        """
        self._load()
        self.model.train()
        step = 0
        for epoch in range(self.params.epochs):
            order = (len(self.examples), self.params.global_batch_rows, self.seed, epoch)
            for indices in global_batches(*order):
                step += 1
                if step <= len(self.records):
                    continue
                self._step(step, [self.examples[index] for index in indices])
                if self.stop_requested():
                    self._save()
                    return step == self.num_steps
                if self._save_is_due(step):
                    self._save()
        return True

    def _step(self, step: int, batch: Sequence[Example]) -> None:
        # One seed for each step makes dropout independent of where training was interrupted.
        torch.manual_seed(derive_seed(self.seed, "step", step))
        factor = learning_rate_factor(step - 1, self.num_steps, self.params)
        learning_rate = self.params.learning_rate * factor
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        num_tokens = sum(example.num_response_tokens for example in batch)
        device = self.model.device
        loss = 0.0
        for rows in micro_batches(batch, self.params.micro_batch_rows):
            with torch.autocast(
                device.type, dtype=self.autocast, enabled=self.autocast is not None
            ):
                logprobs = self._logprobs(
                    rows.input_ids.to(device), rows.source_index.to(device), rows.targets.to(device)
                )
            part = -logprobs.sum() / num_tokens
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(
            self._parameters.values(), self.params.max_grad_norm or math.inf
        )
        if not math.isfinite(loss) or not torch.isfinite(norm):
            # Not a crash: every retry would come to the same step with the same numbers.
            raise UserError(
                f"training diverged at step {step}: loss {loss}, gradient norm {norm.item()}",
                f"lower sft.learning_rate ({self.params.learning_rate})",
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        record = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": norm.item(),
            "response_tokens": num_tokens,
        }
        self.records.append(record)
        self.report(step, record)

    def _save_is_due(self, step: int) -> bool:
        every = self.params.checkpoint_every_steps
        due = time.monotonic() - self._saved_at >= self.params.checkpoint_every_seconds
        return due or (every is not None and step % every == 0)

    def _save(self) -> None:
        """Replaces the checkpoint: weights, both moments, and the records so far."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[f"weight/{name}"] = parameter.detach()
            for moment in _MOMENTS:
                tensors[f"{moment}/{name}"] = self._optimizer.state[parameter][moment]
        partial = self._state_path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"records": json.dumps(self.records)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(self._state_path)
        self._saved_at = time.monotonic()

    def _load(self) -> None:
        if not self._state_path.exists():
            return
        with safe_open(self._state_path, "pt") as state, torch.no_grad():
            self.records = json.loads(state.metadata()["records"])
            for name, parameter in self._parameters.items():
                parameter.copy_(state.get_tensor(f"weight/{name}"))
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(len(self.records))),
                    **{
                        moment: state.get_tensor(f"{moment}/{name}").to(parameter.device)
                        for moment in _MOMENTS
                    },
                }


def _make_optimizer(parameters: dict[str, nn.Parameter], params: SftParams) -> torch.optim.AdamW:
    """AdamW whose decay spares vectors (norms and biases)."""
    matrices = [each for each in parameters.values() if each.ndim >= 2]
    vectors = [each for each in parameters.values() if each.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": params.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=params.learning_rate,
    )
