"""DeepSpeed's ZeRO: engine, configuration, and the reference in shards.

Every forward pass of a model in shards is collective: all processes make as many, each on rows of
its own. DeepSpeed writes one file of optimizer state per process.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.training.batches import Plan
from stages.training.engine import Engine
from stages.training.params import TrainingParams
from stages.training.policy import Numerics, check_model


class ZeroEngine(Engine):
    """An engine whose gradients, optimizer state and weights DeepSpeed shards as its stage says.

    Under ZeRO-3 the policy is loaded within :func:`sharded_loading`.
    """

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of a micro-batch's loss."""
        self._wrapped.set_gradient_accumulation_boundary(is_boundary=last)
        # The loss is a part of the global batch's mean already.
        self._wrapped.backward(loss, scale_wrt_gas=False)

    def save(self, folder: Path) -> None:
        """Writes what training goes on from; a collective call."""
        self._wrapped.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """Takes what :meth:`save` wrote; a collective call."""
        self._wrapped.load_checkpoint(str(folder))

    def _wrap(self) -> nn.Module:
        import deepspeed

        wrapped, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=self.optimizer,
            config=training_config(self._plan, self._numerics),
        )
        return wrapped

    def _update(self) -> float | None:
        self._wrapped.step()
        norm = self._wrapped.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm

    def _whole(self, share: Tensor) -> Tensor | None:
        import deepspeed

        with deepspeed.zero.GatheredParameters([share], enabled=hasattr(share, "ds_id")):
            # DeepSpeed's tensors are parts of large ones, which would be written whole.
            return share.detach().to("cpu", copy=True) if self._process.is_first else None


def training_config(plan: Plan[Any], numerics: Numerics) -> dict[str, Any]:
    """DeepSpeed's configuration of a training; optimizer and schedule are the engine's own."""
    params = plan.params
    config = _config(params, numerics)
    if params.deepspeed.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = _on_host(numerics)
    return config | {
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": params.max_grad_norm,
        # DeepSpeed wants its compiled AdamW for an offloaded optimizer; torch's is the one
        # that gives the same result everywhere.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def _config(params: TrainingParams, numerics: Numerics) -> dict[str, Any]:
    if not numerics.on_gpu:
        _reduce_by_gloo()
    offload = params.deepspeed.offload_parameters
    return {
        # A micro-batch is one item of the data set, however many pairs are in it.
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": params.deepspeed.zero_stage}
        | ({"offload_param": _on_host(numerics)} if offload else {}),
        # Weights, gradients and their sums are float32 in all processes.
        "torch_autocast": {
            "enabled": numerics.autocast,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "steps_per_print": 2**31,
    }


def _on_host(numerics: Numerics) -> dict[str, Any]:
    return {"device": "cpu", "pin_memory": numerics.on_gpu}


def _reduce_by_gloo() -> None:
    """Keeps DeepSpeed from building a kernel for the collectives of a CPU.

    The lock of torch's builds outlives a killed process, and every later build waits for it.
    """
    import deepspeed
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False


@contextmanager
def sharded_loading(params: TrainingParams, numerics: Numerics) -> Iterator[None]:
    """Has transformers shard what it loads within the block, if DeepSpeed's stage is 3."""
    # transformers looks for the newest one that lives.
    sharding = HfDeepSpeedConfig(_config(params, numerics))
    try:
        yield
    finally:
        del sharding
        unset_hf_deepspeed_config()


@contextmanager
def sharded_logprob_model(
    load: Callable[[], ResponseLogprobs], params: TrainingParams, numerics: Numerics
) -> Iterator[nn.Module]:
    """A model for forward passes without gradients; its shards are released after the block.

    It draws no random numbers of the training's, which so is the same if no pass is needed.
    """
    import deepspeed

    devices = [numerics.device] if numerics.on_gpu else []
    with torch.random.fork_rng(devices):
        with sharded_loading(params, numerics):
            module = load()
        engine, *_ = deepspeed.initialize(model=module, config=_config(params, numerics))
        try:
            check_model(causal_lm(module.policy), params, numerics)
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
