"""Steps of plain DPO as the engine takes them, on models of random weights made in memory.

Each variation trains from the same weights and pairs: a pass for log π_ref, steps
that warm up, and steps that count. Tokens are counted over all responses with their prompts. A
pair's prompt is computed once, and counts once in model FLOPs.
"""

from __future__ import annotations

import gc
import inspect
import io
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM

from benchmarks.flops import step_tflop
from benchmarks.gpu.figures import Figures, nominal_flops, peak_gib, reset_peak, wait
from benchmarks.gpu.tasks import Task, Variation
from benchmarks.training.shapes import SHAPES, Shape, make_pairs, random_model
from stages.contract.events import Emitter
from stages.modeling import logprobs
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.objectives.kappa import KappaController
from stages.train.data import Pair, load_pairs
from stages.train.objective import PairObjective
from stages.train.params import TrainParams
from stages.train.reference import _share
from stages.training.adapters import add_adapters, leave_casts_to_autocast
from stages.training.batches import Plan
from stages.training.engine import Engine, Process
from stages.training.fit import Fit
from stages.training.loop import TrainingLoop
from stages.training.policy import (
    Numerics,
    check_model,
    compile_layers,
    compute_repeatably,
    enable_gradient_checkpointing,
    leave_layers_eager,
    logprob_model,
)

TINY = replace(SHAPES["head-heavy"], vocabulary=512, width=64, inner=96, layers=2)
_WARM_UP_STEPS = 2
_KERNELS = 25


def measure(figures: Figures, device: torch.device, task: Task, *, dry: bool) -> None:
    """Writes the figures of each variation, and of one with half the tokens if memory ends."""
    accept_older_torch()
    with tempfile.TemporaryDirectory() as folder:
        shape = TINY if dry else SHAPES[task.shape]
        count, scale = (4, 0.1) if dry else (task.batch_pairs * 2, 1.0)
        pairs = _pairs(shape, Path(folder), count, scale)
    if dry:
        task = replace(task, batch_pairs=2, steps=1)
    losses: list[float] = []
    gradient: torch.Tensor | None = None
    for planned in task.variations:
        variation = replace(planned, tokens=64) if dry else planned
        while True:
            try:
                step_losses, first = _train(figures, variation, task, shape, pairs, device, dry=dry)
            except torch.OutOfMemoryError as error:
                figures.write(variation.name, tokens=variation.tokens, error=str(error)[:200])
                variation = replace(variation, tokens=variation.tokens // 2)
            except Exception:
                with figures.guarded(variation.name):
                    raise
                break
            else:
                losses = losses or step_losses
                gradient = first if gradient is None else gradient
                gaps = [abs(one - other) for one, other in zip(step_losses, losses, strict=False)]
                figures.write(
                    f"{variation.name}: losses",
                    losses=step_losses,
                    most_apart=max(gaps),
                    cosine_of_first_gradient=torch.cosine_similarity(first, gradient, dim=0).item(),
                )
                break
            finally:
                _forget()


class _Clock:
    """Takes the records of steps in a log's place."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self._last = 0.0

    def start(self, done: int) -> None:
        """Starts the clock."""
        self._last = time.perf_counter()

    def report(self, step: int, values: dict[str, float]) -> None:
        """Takes a step's values and its time."""
        now = time.perf_counter()
        self.records.append({**values, "seconds": now - self._last})
        self._last = now


class MasterEngine(Engine):
    """Trains bfloat16 weights by an optimizer of float32 copies."""

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in self.optimizer.param_groups:
            pairs = [(weight, nn.Parameter(weight.detach().float())) for weight in group["params"]]
            group["params"] = [master for _, master in pairs]
            self._pairs += pairs

    def _update(self) -> float | None:
        for weight, master in self._pairs:
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        masters = [master for _, master in self._pairs]
        norm = nn.utils.clip_grad_norm_(masters, self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_([weight for weight, _ in self._pairs], masters)
        return norm.item()


class _Chooser(Fit[TrainParams]):
    """The choices of the stage for a plan; the benchmark itself loads the model and trains."""

    def __init__(self, plan: Plan[Pair], numerics: Numerics, process: Process) -> None:
        self.ctx: Any = SimpleNamespace(params=plan.params)
        self.plan = plan
        self.numerics = numerics
        self.process = process

    def load_model(self) -> ResponseLogprobs:
        raise NotImplementedError

    def make_objective(self, engine: Engine) -> Any:
        raise NotImplementedError

    def write_records(self, log: Any) -> None:
        raise NotImplementedError


def _train(
    figures: Figures,
    variation: Variation,
    task: Task,
    shape: Shape,
    pairs: list[Pair],
    device: torch.device,
    *,
    dry: bool,
) -> tuple[list[float], torch.Tensor]:
    """Trains, writes the rates, and returns each step's loss and a part of the first gradient."""
    started = time.perf_counter()
    params = TrainParams(
        design="none",
        kappa=0.0,
        epochs=-(-(_WARM_UP_STEPS + task.steps) * task.batch_pairs // len(pairs)),
        learning_rate=1e-5,
        lr_schedule="constant",
        warmup_ratio=0.0,
        global_batch_pairs=task.batch_pairs,
        precision=variation.precision,
        micro_batch_tokens=None if variation.as_stage else variation.tokens,
        compile_layers=True if variation.as_stage else "auto",
        lora={"rank": task.lora_rank},
        deepspeed={"zero_stage": "off" if variation.zero == "off" else int(variation.zero)},
    )
    reset_peak(device)
    process = Process(0, 0, 1, Emitter(io.StringIO()), lambda: False)
    numerics = Numerics.of(params, on_gpu=device.type == "cuda", local_rank=0)
    if variation.masters and not dry:
        numerics = replace(numerics, weights="bfloat16")
    plan = Plan(pairs, params, task.batch_pairs, 1, seed=0)
    with ExitStack() as stack:
        compute_repeatably(on_gpu=device.type == "cuda")
        if not variation.kernels:
            off = mock.patch.object(logprobs, "is_fused", lambda *_: False)
            stack.enter_context(off)
        chooser = _Chooser(plan, numerics, process)
        engine, ref_logprobs = _engine(variation, task, shape, chooser)
        plan = chooser.plan
        gradient: list[torch.Tensor] = []
        _keep_first_gradient(engine, gradient)
        clock = _Clock()
        kappa = KappaController(params, has_bonus=False)
        objective = PairObjective(engine, process, params, kappa, None, ref_logprobs)
        # The log's first two methods are all that the loop calls.
        log: Any = clock
        checkpoints: Any = mock.Mock()
        loop = TrainingLoop(engine, objective, plan, process, log, checkpoints)
        wait(device)
        begun = time.perf_counter()
        loop.run(0)
        policy = engine.model.policy
        _write(figures, variation, clock, plan, device, policy, begun - started)
        if variation.profiled and device.type == "cuda":
            with figures.guarded(f"{variation.name}: kernels"):
                _profile(figures, variation, loop)
    return [record["loss"] for record in clock.records], gradient[0]


def _keep_first_gradient(engine: Engine, kept: list[torch.Tensor]) -> None:
    """Adds the gradient of up to 20 million weights before the first update to a list."""
    update = engine._update

    def keeping() -> float | None:
        if not kept:
            trained = [weight for weight in engine.model.parameters() if weight.grad is not None]
            parts = [weight.grad.float().flatten() for weight in trained if weight.grad is not None]
            kept.append(torch.cat(parts)[:20_000_000].cpu() if parts else torch.zeros(1))
            del parts
        return update()

    engine._update = keeping


def _write(
    figures: Figures,
    variation: Variation,
    clock: _Clock,
    plan: Plan[Any],
    device: torch.device,
    policy: torch.nn.Module,
    setup_seconds: float,
) -> None:
    counted = clock.records[_WARM_UP_STEPS:]
    seconds = sum(record["seconds"] for record in counted)
    flops = 1e12 * sum(step_tflop(policy, record) for record in counted) / seconds
    nominal = nominal_flops()
    figures.write(
        variation.name,
        tokens_per_second=sum(record["num_tokens"] for record in counted) / seconds,
        pairs_per_second=sum(record["num_pairs"] for record in counted) / seconds,
        model_tflops=flops / 1e12,
        mfu=None if nominal is None else flops / nominal,
        peak_gib=peak_gib(device),
        micro_batch_tokens=plan.params.token_budget,
        recomputes=plan.params.gradient_checkpointing if variation.as_stage else None,
        micro_batches=plan.accumulation,
        step_seconds=[record["seconds"] for record in clock.records],
        setup_seconds=setup_seconds,
        graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
    )


def _profile(figures: Figures, variation: Variation, loop: TrainingLoop[Any]) -> None:
    """The kernels that take the most of a micro-batch's passes."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        [batch, *_] = loop.plan.batches(0, 0)
        loop.micro_step(batch, last=True)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    rows = [
        f"{event.self_device_time_total / 1e3:.2f} ms, {event.count}: {event.key[:90]}"
        for event in events[:_KERNELS]
    ]
    figures.write(f"{variation.name}: kernels", micro_batch_ms=total / 1e3, longest=rows)


def _engine(
    variation: Variation,
    task: Task,
    shape: Shape,
    chooser: _Chooser,
) -> tuple[Engine, dict[int, Any]]:
    """The engine, and log π_ref by the policy before training."""
    plan = chooser.plan
    numerics = chooser.numerics
    process = chooser.process
    params = plan.params
    if variation.zero != "off":
        return _zero_engine(variation, shape, plan, numerics, process)
    policy: Any = random_model(shape)
    policy = policy.to(numerics.device, getattr(torch, numerics.weights))
    model = logprob_model(policy, params, numerics)
    if variation.compiled_reference or (variation.as_stage and chooser.compiled):
        compile_layers(model.policy)
    ref_logprobs = _share(model, plan.samples, numerics, plan.params, process)
    leave_layers_eager(model.policy)
    if task.lora_rank:
        model = ResponseLogprobs(add_adapters(model.policy, params.lora))
        if numerics.autocast and not variation.casts:
            leave_casts_to_autocast(model.policy)
    if variation.recompute:
        enable_gradient_checkpointing(model.policy, stage="train")
    if variation.compiled:
        compile_layers(model.policy)
    if variation.as_stage:
        chooser._choose_by_memory(model)
        plan = chooser.plan
    kind = MasterEngine if variation.masters else Engine
    return kind(model, plan, numerics, process), ref_logprobs


def _zero_engine(
    variation: Variation,
    shape: Shape,
    plan: Plan[Pair],
    numerics: Numerics,
    process: Process,
) -> tuple[Engine, dict[int, Any]]:
    from stages.training import zero

    if not torch.distributed.is_initialized():
        backend = "nccl" if numerics.device.type == "cuda" else "gloo"
        # DeepSpeed reads them.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        torch.distributed.init_process_group(backend)
    plain: Any = random_model(shape).to(numerics.device)
    model = logprob_model(plain, plan.params, numerics)
    ref_logprobs = _share(model, plan.samples, numerics, plan.params, process)
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        plain.save_pretrained(folder)
        del plain
        with zero.sharded_loading(plan.params, numerics):
            dtype = getattr(torch, numerics.weights)
            policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = logprob_model(policy, plan.params, numerics)
    if variation.compiled:
        compile_layers(model.policy)
    engine = zero.ZeroEngine(model, plan, numerics, process)
    # Weights in shards get the attention of packed rows once they can be run.
    check_model(causal_lm(model.policy), plan.params, numerics)
    return engine, ref_logprobs


def accept_older_torch() -> None:
    """Makes torch 2.11 accept `enable_gqa`, which its kernel does not need."""
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        return
    older = varlen.varlen_attn

    def newer(*tensors: Any, enable_gqa: bool, **options: Any) -> Any:
        return older(*tensors, **options)

    varlen.varlen_attn = newer


def fast_folder() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _pairs(shape: Shape, folder: Path, count: int, scale: float) -> list[Pair]:
    make_pairs(shape, folder / "pairs.parquet", num_pairs=count, scale=scale)
    pairs, _ = load_pairs([folder / "pairs.parquet"], TrainParams())
    return pairs


def _forget() -> None:
    """Gives back what a variation took, also one that failed."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
