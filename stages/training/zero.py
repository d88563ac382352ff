"""DeepSpeed's ZeRO: engine, configuration, the reference in shards, and universal checkpoints.

Every forward pass of a model in shards is collective: all processes make as many, each on rows of
its own. DeepSpeed writes one file of optimizer state per process. Its converter joins them into
one tensor per weight, the universal form, which any number of processes can load.
"""

import contextlib
import gc
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.training.adapters import wear_adapters
from stages.training.batches import Plan
from stages.training.engine import Engine
from stages.training.params import TrainingParams
from stages.training.policy import Numerics, check_model, remove_dropout

# File that DeepSpeed writes last, and reads first.
UNIVERSAL_MARK = "latest_universal"


class ZeroEngine(Engine):
    """An engine whose gradients, optimizer state and weights DeepSpeed shards as its stage says.

    Under ZeRO-3 the policy is loaded within :func:`sharded_loading`.
    """

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of a micro-batch's loss; the last one of a step updates the weights."""
        self._wrapped.set_gradient_accumulation_boundary(is_boundary=last)
        # The loss is a part of the global batch's mean already.
        self._wrapped.backward(loss, scale_wrt_gas=False)
        if last:
            self._wrapped.step()

    def save(self, folder: Path) -> None:
        """Writes what training goes on from; a collective call."""
        self._wrapped.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """Takes what :meth:`save` wrote, or its universal form; a collective call."""
        self._wrapped.load_checkpoint(str(folder))
        if self._wrapped.load_universal_checkpoint():
            mend_optimizer(self.optimizer, self._weight_decays)

    def _wrap(self) -> nn.Module:
        import deepspeed

        # DeepSpeed drops empty groups: adapters have no weight that is spared of decay.
        groups = self.optimizer.param_groups
        self._weight_decays = [group["weight_decay"] for group in groups if group["params"]]
        wrapped, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=self._config
        )
        assert isinstance(wrapped, nn.Module)
        return wrapped

    def _update(self) -> float | None:
        norm = self._wrapped.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm

    def _whole(self, share: Tensor) -> Tensor | None:
        import deepspeed

        in_shards = hasattr(share, "ds_id")
        with deepspeed.zero.GatheredParameters([share], enabled=in_shards):
            # DeepSpeed's tensors are parts of large ones, which would be written whole.
            return share.detach().to("cpu", copy=True) if self._process.is_first else None


def training_config(plan: Plan[Any], numerics: Numerics, *, load_universal: bool) -> dict[str, Any]:
    """DeepSpeed's configuration of a training; optimizer and schedule are the engine's own."""
    params = plan.params
    config = _config(params, numerics, params.deepspeed.zero_stage)
    if params.deepspeed.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = _on_host(numerics)
    return config | {
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": params.max_grad_norm,
        "checkpoint": {"load_universal": load_universal},
        # With an offloaded optimizer DeepSpeed wants its own compiled AdamW; torch's is the one
        # that gives the same result everywhere.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def _config(params: TrainingParams, numerics: Numerics, stage: int | str) -> dict[str, Any]:
    if numerics.device.type == "cpu":
        _reduce_by_gloo()
    offload = params.deepspeed.offload_parameters
    return {
        # A micro-batch is one item of the data set, however many pairs are in it.
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage}
        | ({"offload_param": _on_host(numerics)} if offload else {}),
        "bf16": {"enabled": numerics.bfloat16},
        "steps_per_print": 2**31,
    }


def _on_host(numerics: Numerics) -> dict[str, Any]:
    return {"device": "cpu", "pin_memory": numerics.device.type == "cuda"}


def _reduce_by_gloo() -> None:
    """Keeps DeepSpeed from building a kernel of its own for the collectives of a CPU.

    The lock of torch's builds outlives a killed process, and every later build waits for it.
    """
    import deepspeed
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False


@contextmanager
def sharded_loading(config: dict[str, Any]) -> Iterator[None]:
    """Has transformers shard what it loads within the block, if DeepSpeed's stage is 3."""
    # transformers looks for the newest one that lives.
    sharding = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        del sharding
        unset_hf_deepspeed_config()


@contextmanager
def sharded_logprob_model(
    source: ModelSource, params: TrainingParams, numerics: Numerics
) -> Iterator[nn.Module]:
    """A model for forward passes without gradients; its shards are released after the block.

    It draws no random numbers of the training's, which so is the same if no pass is needed.
    """
    import deepspeed

    config = _config(params, numerics, stage=3)
    devices = [numerics.device] if numerics.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        with sharded_loading(config):
            base = replace(source, adapter=None)
            model = load_causal_lm(base, dtype=numerics.weights, device=numerics.device)
            remove_dropout(model)
            if source.adapter is not None:
                model = wear_adapters(model, params.lora, Path(source.adapter))
            module = ResponseLogprobs(model)
        engine, *_ = deepspeed.initialize(model=module, config=config)
        try:
            model = causal_lm(module.policy)
            check_model(model, params, place=source.name_or_path)
            engine.eval()
            yield engine
        finally:
            engine.destroy()
            _release(module)


def _release(module: nn.Module) -> None:
    """Gives the weights' memory back: DeepSpeed's own lists keep the module itself."""
    for weight in module.parameters():
        # DeepSpeed adds its attributes to torch's parameters.
        sharded: Any = weight
        sharded.data = torch.empty(0)
        sharded.ds_tensor.data = torch.empty(0)
    gc.collect()


def convert_to_universal(checkpoint: Path) -> None:
    """Adds the universal form to a checkpoint, which takes as much room again; for one process."""
    from deepspeed.checkpoint import ds_to_universal

    written = checkpoint / (checkpoint / "latest").read_text().strip()
    converted = checkpoint / f"{written.name}_universal"
    # A conversion that was interrupted may have left it.
    shutil.rmtree(converted, ignore_errors=True)
    converted.mkdir()
    asked = Namespace(
        input_folder=str(written),
        output_folder=str(converted),
        # In this process: a forked one may hang on the threads of torch.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # Says which weights are split among model-parallel processes: none are here.
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(sys.stderr):
        ds_to_universal.main(asked)


def mend_optimizer(optimizer: Optimizer, weight_decays: Sequence[float]) -> None:
    """Puts right what DeepSpeed 0.19 does wrong when ZeRO-3 loads a universal checkpoint.

    It gives all weights one tensor that counts the steps, which the optimizer then advances once
    for each of them, and all groups the first one's weight decay.
    """
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()
    for group, weight_decay in zip(optimizer.param_groups, weight_decays, strict=True):
        group["weight_decay"] = weight_decay
