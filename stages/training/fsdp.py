"""Weights, gradients and optimizer state in shards by torch's FSDP2 (`fully_shard`).

`fully_shard` is called here, not by accelerate, whose FSDP2 is for accelerators alone; this is the
same on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stages.contract.errors import UserError
from stages.modeling.file_backed import Place
from stages.modeling.load import DTYPES
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.training.adapters import has_adapters
from stages.training.engine import Engine
from stages.training.params import TrainingParams
from stages.training.policy import Numerics, decoder_layers

_FOLDER = "fsdp"
# Frozen weights are the base model's, which is loaded anyway.
_TRAINED = StateDictOptions(ignore_frozen_params=True)
# Weights of less than this part of a layer are gathered with the rest of it.
_SMALL_PARTS = 64


def shard(model: ResponseLogprobs, numerics: Numerics, params: TrainingParams) -> None:
    """Keeps this process's share of each weight; a collective call.

    A decoder layer is gathered when it is run, on a CPU its linear layers one by one unless it is
    compiled; embeddings and head, too, unless they are one weight: it is gathered for all of a
    forward and backward pass. In bfloat16 weights are gathered and computed so, and gradients added
    up in float32, the dtype of the shards.

    Args:
        model: Whole, the same in all processes, in the host's memory or in its files: what FSDP2
            copies, cast if it is of another dtype, is one group of weights at a time.
        numerics: Device and dtypes.
        params: Those of the stage.

    Raises:
        UserError: The model has no layers that could be told apart.
    """
    mesh = init_device_mesh(numerics.device.type, (torch.distributed.get_world_size(),))
    low = torch.bfloat16 if numerics.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)
    # What a part gets is of the dtype that the whole would have given it.
    of_part = replace(policy, cast_forward_inputs=False)
    layers = decoder_layers(model.policy)
    if not layers:
        raise UserError(
            f"{type(causal_lm(model.policy)).__name__} has no decoder layers that could be sharded "
            "one by one",
            f"leave {params.stage}.sharding out",
        )
    # Adapters are of another dtype than the weights beside them, and all are as they shall be.
    cast = not has_adapters(model.policy)
    # An accelerator hides the gathering of a layer behind the layer before, not of small pieces.
    in_parts = numerics.device.type == "cpu" and not params.compile
    parts = _large_parts(model, layers) if in_parts else []
    ends = _untied_ends(model)
    elsewhere: set[nn.Parameter] = set()
    for module in (*parts, *layers, *ends, model):
        if cast:
            _cast(module, DTYPES[numerics.weights])
        inner = module in parts or module in ends
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=of_part if inner else policy,
            ignored_params=elsewhere,
        )
        if module is model.head:
            # The model's own head, which is never run, stands for the weights in checkpoints.
            own = causal_lm(model.policy).get_output_embeddings()
            own.weight, own.bias = model.head.weight, model.head.bias
            elsewhere = set(own.parameters())
    if ends:
        # An embedding's gradient takes ids alone.
        ends[0].set_unshard_in_backward(False)


class FsdpEngine(Engine):
    """An engine of a model that :func:`shard` has put in shards."""

    def save(self, folder: Path) -> None:
        """Writes trained weights and optimizer state, each process its share; collective."""
        state = {
            "model": get_model_state_dict(self.model, options=_TRAINED),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=_TRAINED),
        }
        dcp.save(state, checkpoint_id=folder / _FOLDER)
        if self._process.is_first:
            self._save_schedule(folder)

    def load(self, folder: Path) -> None:
        """Takes weights and state, whatever number of processes wrote them; collective."""
        weights = {"model": get_model_state_dict(self.model, options=_TRAINED)}
        dcp.load(weights, checkpoint_id=folder / _FOLDER)
        options = StateDictOptions(ignore_frozen_params=True, strict=False)
        set_model_state_dict(self.model, weights["model"], options=options)
        state = {
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=_TRAINED)
        }
        dcp.load(state, checkpoint_id=folder / _FOLDER)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=_TRAINED)
        self._load_schedule(folder)

    def _wrap(self) -> nn.Module:
        return self.model

    def _whole(self, share: Tensor, place: Place, dtype: torch.dtype | None) -> Tensor | None:
        whole = share.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if not self._process.is_first:
            return None
        wanted = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
        return place(whole.shape, wanted).copy_(whole)


def _untied_ends(model: ResponseLogprobs) -> list[Any]:
    """Embeddings and head if each is a weight of its own that no other module reads."""
    inner = causal_lm(model.policy)
    embeddings, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    if type(embeddings) is not nn.Embedding or embeddings.weight is head.weight:
        return []
    return [embeddings, model.head]


def _large_parts(model: ResponseLogprobs, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Linear layers of decoder layers that can be gathered on their own: those that are called.

    A layer may read the weight of another without calling it, or leave it out for some rows.
    Adapters are gathered with their layer: peft asks for the dtype of their weights beforehand,
    which in shards is another than the products'.
    """
    adapted = has_adapters(model.policy)
    linear = [
        each
        for layer in layers
        for each in layer.modules()
        if type(each) is nn.Linear
        and not (adapted and each.weight.requires_grad)
        and each.weight.numel() * _SMALL_PARTS >= sum(map(torch.numel, layer.parameters()))
    ]
    called: dict[nn.Module, None] = {}
    hooks = [
        each.register_forward_hook(lambda *of: called.update({of[0]: None})) for each in linear
    ]
    token = torch.zeros(1, dtype=torch.long)
    # Draws nothing of the training's random numbers, whatever dropout an adapter has.
    with torch.no_grad(), torch.random.fork_rng([]):
        model(token[None], token, token)
    for hook in hooks:
        hook.remove()
    return list(called)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters that are not in shards yet; tied ones stay one."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype)
