"""Weights, gradients and optimizer state in shards by torch's FSDP2 (`fully_shard`).

The Trainer is told that the model shards itself (`is_distributed_loading_by_transformers`), and
leaves it as it is: accelerate's own FSDP2 is for accelerators alone, and this is the same on a CPU.
"""

from __future__ import annotations

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
from torch.optim import Optimizer

from stages.contract.errors import UserError
from stages.modeling.load import DTYPES
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.training.adapters import has_adapters
from stages.training.compiled import decoder_layers
from stages.training.numerics import Numerics

_FOLDER = "fsdp"
# Frozen weights are the base model's, which is loaded anyway.
_TRAINED = StateDictOptions(ignore_frozen_params=True)


def shard(model: ResponseLogprobs, numerics: Numerics, *, stage: str) -> None:
    """Keeps this process's share of each weight; a collective call.

    A decoder layer is gathered when it is run, and embeddings, last norm and head for all of a
    forward and backward pass. In bfloat16 layers are gathered and computed so, and gradients added
    up in float32, the dtype of the shards.

    Args:
        model: Whole, the same in all processes, in the host's memory or in its files: what FSDP2
            copies, cast where it is of another dtype, is one layer at a time.
        numerics: Device and dtypes.
        stage: Name of the stage, for messages.

    Raises:
        UserError: The model has no layers that could be told apart.
    """
    mesh = init_device_mesh(numerics.device.type, (torch.distributed.get_world_size(),))
    low = torch.bfloat16 if numerics.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)
    layers = decoder_layers(model.policy)
    if not layers:
        raise UserError(
            f"{type(causal_lm(model.policy)).__name__} has no decoder layers that could be sharded "
            "one by one",
            f"leave {stage}.sharding out",
        )
    # Adapters are of another dtype than the weights beside them, and all are as they shall be.
    cast = not has_adapters(model.policy)
    for module in (*layers, model):
        if cast:
            _cast(module, DTYPES[numerics.weights])
        fully_shard(module, mesh=mesh, mp_policy=policy)
    # Read by the Trainer: it neither moves nor wraps the model.
    vars(model)["is_distributed_loading_by_transformers"] = True


def whole_weights(
    model: nn.Module, *, keep: bool, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Gathers the weights one by one; a collective call.

    Args:
        model: The sharded model.
        keep: Whether this process wants them: in the host's memory.
        dtype: Type in which it wants them; that of the shards if unset.
    """
    weights = {}
    for name, share in model.state_dict().items():
        whole = share.full_tensor() if isinstance(share, DTensor) else share
        if keep:
            weights[name] = whole.to("cpu", dtype if whole.is_floating_point() else None)
    return weights


def save(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Writes trained weights and optimizer state, each process its share; a collective call."""
    dcp.save(_state(model, optimizer), checkpoint_id=checkpoint / _FOLDER)


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Takes trained weights, whatever number of processes wrote them; a collective call."""
    state = {"model": get_model_state_dict(model, options=_TRAINED)}
    dcp.load(state, checkpoint_id=checkpoint / _FOLDER)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_model_state_dict(model, state["model"], options=options)


def load_optimizer(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Takes the optimizer's state, whatever number of processes wrote it; a collective call."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=_TRAINED)}
    dcp.load(state, checkpoint_id=checkpoint / _FOLDER)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_TRAINED)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters that are not in shards yet; tied ones stay one."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=_TRAINED),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_TRAINED),
    }
