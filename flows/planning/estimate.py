"""Estimate of a run: the cost of each of its steps, what the store saves, and what cannot fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flows.execution.plan import PlannedStep
from flows.pipeline.algorithm import all_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.step import Output, Source, Step
from flows.planning import sizes
from flows.planning.cost import DTYPE_BYTES, GIB, GPUS, Cost, Device, this_cpu
from flows.planning.inference import forward_cost, generation_cost
from flows.planning.sizes import ModelShape
from flows.planning.training import Samples, TrainingSetting, training_cost
from stages.contract.request import Resources
from stages.contract.stores import open_store
from stages.evaluate.params import EvaluateParams
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.score.params import ORACLES, ScoreParams
from stages.sft.params import SftParams
from stages.train.params import TrainParams

_SCORE_BYTES = 40
# A word-level tokenizer of a warm start from scratch has about so many words.
_NEW_VOCABULARY = 1024
# Start of a step's program; vLLM's with its graphs.
_START_SECONDS = 2.0
_VLLM_START_SECONDS = 60.0
# Oracles that load no model and ask no server.
_LIGHT_ORACLES = frozenset({"python", "math_verify"})


@dataclass(frozen=True)
class StepEstimate:
    """Cost of one step, whether or not the store has it.

    Attributes:
        step: Name of the step.
        stage: Its stage.
        cached: Whether the store has its artifact.
        processes: Processes that share the work, on all nodes.
        gpus: GPUs, on all nodes.
        device: What each process computes on.
        cost: What it costs.
        warnings: What cannot fit or could not be estimated.
    """

    step: str
    stage: str
    cached: bool
    processes: int
    gpus: int
    device: str
    cost: Cost
    warnings: tuple[str, ...]

    @property
    def gpu_hours(self) -> float:
        """Hours of all its GPUs."""
        return self.gpus * (self.cost.seconds or 0.0) / 3600


@dataclass(frozen=True)
class Estimate:
    """Cost of a run.

    Attributes:
        steps: Its steps, in an order in which they could be computed.
        seconds: Wall time of the steps that the store lacks.
        price_per_gpu_hour: As configured.
        warnings: Warnings of the steps that the store lacks, each once, and of the disk.
    """

    steps: tuple[StepEstimate, ...]
    seconds: float
    price_per_gpu_hour: float | None
    warnings: tuple[str, ...]

    def gpu_hours(self, *, cached: bool) -> float:
        """GPU-hours of the steps that the store has, or lacks."""
        return sum(each.gpu_hours for each in self.steps if each.cached == cached)

    def disk(self) -> float:
        """Bytes that the steps still to be computed will keep."""
        return sum(each.cost.disk for each in self.steps if not each.cached)

    def price(self, gpu_hours: float) -> float | None:
        """Money for GPU-hours, if the configuration names a price."""
        return None if self.price_per_gpu_hour is None else self.price_per_gpu_hour * gpu_hours


def estimate(
    config: RunConfig, planned: Sequence[PlannedStep], steps: Sequence[Step] | None = None
) -> Estimate:
    """Estimates a run without starting anything.

    Args:
        config: The run's configuration.
        planned: Its plan, which says what the store has.
        steps: Its steps, if its inputs from outside are not to be looked for.
    """
    cached = {each.step for each in planned if each.action == "reuse"}
    taken = all_steps(config) if steps is None else steps
    costs = _Costs(config)
    found = [costs.estimate(each, cached=each.name in cached) for each in taken]
    lacking = [each for each in found if not each.cached]
    upstream = {each.name: each.upstream() for each in taken}
    lasting = {each.step: each.cost.seconds or 0.0 for each in lacking}
    warnings = [warning for each in lacking for warning in each.warnings]
    return Estimate(
        tuple(found),
        wall_seconds(lasting, upstream, config.execution.parallel),
        config.estimation.price_per_gpu_hour,
        tuple(dict.fromkeys([*warnings, *_disk_warnings(config, lacking)])),
    )


def wall_seconds(
    seconds: Mapping[str, float], upstream: Mapping[str, Sequence[str]], parallel: int
) -> float:
    """Wall time of steps: as the longest chain lasts, or all of them ``parallel`` at a time.

    Args:
        seconds: Time of each step, inputs before the steps that read them.
        upstream: Names of the steps that each reads from; a step without a time is there.
        parallel: Steps that may run at the same time.
    """
    ends: dict[str, float] = {}
    for name, own in seconds.items():
        ends[name] = own + max((ends.get(each, 0.0) for each in upstream.get(name, ())), default=0)
    return max([sum(seconds.values()) / parallel, *ends.values()])


def _disk_warnings(config: RunConfig, todo: Sequence[StepEstimate]) -> list[str]:
    if "://" in config.store:
        return []
    store = open_store(config.store)
    needed = sum(each.cost.disk for each in todo)
    needed += max((each.cost.work_disk for each in todo), default=0.0)
    free = shutil.disk_usage(store.root).free
    if needed <= free:
        return []
    return [
        f"the run writes about {needed / GIB:.0f} GiB, and {free / GIB:.0f} GiB are free at "
        f"{store.root}: name another `store`, or make room (`geb gc --delete`)"
    ]


def _too_large(step: Step, cost: Cost, resources: Resources, device: Device) -> list[str]:
    """A warning if a process does not fit its device, or all do not fit this machine."""
    local = resources.gpus or resources.processes
    needed = cost.peak_memory if device.is_gpu else local * cost.peak_memory
    if needed <= device.memory:
        return []
    largest = sorted(cost.memory, key=lambda name: -cost.memory[name])[:3]
    terms = ", ".join(f"{name} {cost.memory[name] / GIB:.1f}" for name in largest)
    place = f"a {device.name}" if device.is_gpu else "this machine"
    return [
        f"{step.stage} does not fit: it takes {needed / GIB:.1f} GiB ({terms}"
        f"{'' if device.is_gpu or local == 1 else f', in each of {local} processes'}), and "
        f"{place} has {device.memory / GIB:.1f}: {cost.remedy}"
    ]


@dataclass(frozen=True)
class _Table:
    """Rows of a table; of responses also their mean length and the number of their prompts."""

    rows: float
    response_tokens: float = 0.0
    prompts: float = 0.0


class _Costs:
    """Costs of a run's steps, asked for in their order.

    It keeps the model of each checkpoint and the rows of each table for the steps that read them.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store = open_store(config.store)
        self._models: dict[str, ModelShape | str] = {}
        self._tables: dict[str, _Table] = {}
        self._prompt_tokens = 0.0

    def estimate(self, step: Step, *, cached: bool) -> StepEstimate:
        """Estimates a step, whether or not the store has it."""
        resources, device = self._place(step)
        cost = _COSTS.get(step.stage, _Costs._light)(self, step)
        if cost.seconds is not None:
            vllm = step.params.image_for(from_hub=False) == "vllm"
            start = _VLLM_START_SECONDS if vllm else _START_SECONDS
            cost = replace(cost, seconds=cost.seconds + start)
        return StepEstimate(
            step=step.name,
            stage=step.stage,
            cached=cached,
            processes=(resources.gpus or resources.processes) * resources.nodes,
            gpus=resources.gpus * resources.nodes,
            device=device.name,
            cost=cost,
            warnings=(*_too_large(step, cost, resources, device), *cost.notes),
        )

    def _place(self, step: Step) -> tuple[Resources, Device]:
        resources: Resources = getattr(self._config.resources, step.stage)
        gpu = GPUS[self._config.estimation.hardware]
        return resources, gpu if resources.gpus else this_cpu(resources.cpus)

    def _model(self, source: Source) -> ModelShape | str:
        if isinstance(source, Output):
            return self._models[source.step]
        return sizes.read_shape(source, self._store)

    def _read(self, step: Step, *names: str) -> _Table:
        """All rows that a step reads under these names, as of one table."""
        sources = [each for name in names for each in step.inputs[name]]
        tables = [self._tables[each.step] for each in sources if isinstance(each, Output)]
        rows = sum(each.rows for each in tables)
        tokens = sum(each.rows * each.response_tokens for each in tables)
        return _Table(rows, tokens / max(rows, 1), sum(each.prompts for each in tables))

    def _light(self, step: Step) -> Cost:
        """Stages without a model; `pair` and others make rows of each prompt's responses."""
        if "responses" in step.inputs:
            read = self._read(step, "responses")
            times = step.params.pairs_per_prompt if isinstance(step.params, PairParams) else 1
            self._tables[step.name] = replace(read, rows=read.prompts * times)
        return Cost(seconds=0.0)

    def _prepare(self, step: Step) -> Cost:
        config, test = self._config, sizes.rows_of(step.inputs.get("test", ()))
        if "train" not in step.inputs:
            self._tables[step.name] = _Table(test.number if test else 0)
            unread = f"the prompts of {step.name} are not on this machine: its suite has no cost"
            return Cost(seconds=0.0, notes=() if test else (unread,))
        data = sizes.rows_of(step.inputs["train"])
        self._prompt_tokens = sizes.prompt_tokens(config, data)
        number = sizes.train_prompts(config, data)
        for iteration in range(1, config.iterations + 1):
            self._tables[f"iteration-{iteration}.parquet"] = _Table(number or 0)
        self._tables["test.parquet"] = _Table(sizes.held_out_prompts(config, test))
        unknown = (
            "the number of prompts is not known before `prepare` has read them: set "
            "estimation.prompts_per_iteration (or prepare.prompts_per_iteration)"
        )
        return Cost(seconds=0.0, notes=() if number is not None else (unknown,))

    def _sft(self, step: Step) -> Cost:
        params = step.params
        assert isinstance(params, SftParams)
        given = step.inputs.get("policy", ())
        shape = (
            self._model(given[0])
            if given
            else sizes.new_model(params.architecture, _NEW_VOCABULARY)
        )
        data = sizes.rows_of(step.inputs["data"])
        if data is None:
            self._models[step.name] = shape
            return Cost(notes=("the rows of inputs.warm_start are not on this machine",))
        longest = params.max_length_tokens or data.tokens
        tokens = min(data.tokens, longest)
        samples = Samples(data.number, tokens, tokens / 2, params.global_batch_rows, False)
        return self._training(step, shape, samples)

    def _train(self, step: Step) -> Cost:
        params = step.params
        assert isinstance(params, TrainParams)
        pairs = self._read(step, "pairs")
        prompt = min(self._prompt_tokens, params.max_prompt_tokens)
        response = min(pairs.response_tokens, params.max_length_tokens - prompt)
        times = 1 if params.row_layout == "packed" else 2
        samples = Samples(
            pairs.rows,
            times * prompt + 2 * response,
            2 * response,
            params.global_batch_pairs,
            params.reference_logprobs == "model",
        )
        return self._training(step, self._model(step.inputs["policy"][0]), samples)

    def _training(self, step: Step, shape: ModelShape | str, samples: Samples) -> Cost:
        params = step.params
        assert isinstance(params, SftParams | TrainParams)
        self._models[step.name] = shape
        if isinstance(shape, str):
            return Cost(notes=(shape,))
        resources, device = self._place(step)
        world = (resources.gpus or resources.processes) * resources.nodes
        return training_cost(
            TrainingSetting(shape, params, device, world),
            resources,
            samples,
            self._config.estimation.training_efficiency,
            save_bytes=DTYPE_BYTES.get(params.save_dtype, shape.dtype_bytes),
            copies=2 if isinstance(params, TrainParams) and params.reference == "ema" else 1,
        )

    def _generate(self, step: Step) -> Cost:
        params = step.params
        assert isinstance(params, GenerateParams)
        [source] = step.inputs["prompts"]
        assert isinstance(source, Output)
        prompts = self._tables[source.path if source.step == "prepare" else source.step].rows
        prompts /= params.num_shards
        tokens = params.counted_response_tokens
        self._tables[step.name] = _Table(prompts * params.num_samples, tokens, prompts)
        if params.backend == "openai":
            return Cost(notes=("a server samples (generate.backend=openai)",))
        shape = self._model(step.inputs["policy"][0])
        if isinstance(shape, str):
            return Cost(notes=(shape,))
        return generation_cost(
            shape,
            params,
            *self._place(step),
            prompts=prompts,
            prompt_tokens=self._prompt_tokens,
            response_tokens=tokens,
        )

    def _score(self, step: Step) -> Cost:
        params = step.params
        assert isinstance(params, ScoreParams)
        table = self._tables[step.name] = self._read(step, "responses")
        if "model" not in step.inputs:
            known = _LIGHT_ORACLES.issuperset(params.parts)
            return Cost(seconds=0.0 if known else None, disk=table.rows * _SCORE_BYTES)
        section = ORACLES[params.needs["model"]].section
        settings = getattr(params, section)
        cost = self._forward(
            step,
            "model",
            table,
            dtype=settings.dtype,
            batch_tokens=settings.tokens_per_batch,
            remedy=f"lower score.{section}.tokens_per_batch, or set score.{section}.dtype=bfloat16",
        )
        # Nothing tells how long a server takes that is asked beside the model.
        others = set(params.parts) - {params.needs["model"]}
        return cost if _LIGHT_ORACLES.issuperset(others) else replace(cost, seconds=None)

    def _evaluate(self, step: Step) -> Cost:
        params = step.params
        assert isinstance(params, EvaluateParams)
        if params.log_pi_ref == "off":
            return Cost(seconds=0.0)
        sides = ["responses", "base_responses"] if params.log_pi_ref == "both" else ["responses"]
        return self._forward(
            step,
            "reference",
            self._read(step, *sides),
            dtype=params.dtype,
            batch_tokens=params.batch_tokens,
            remedy="lower evaluate.batch_tokens, or set evaluate.dtype=bfloat16 or "
            "evaluate.log_pi_ref=off",
        )

    def _forward(
        self, step: Step, model: str, read: _Table, *, dtype: str, batch_tokens: int, remedy: str
    ) -> Cost:
        shape = self._model(step.inputs[model][0])
        if isinstance(shape, str):
            return Cost(notes=(shape,))
        return forward_cost(
            shape,
            *self._place(step),
            dtype=dtype,
            batch_tokens=batch_tokens,
            sequences=read.rows,
            sequence_tokens=self._prompt_tokens + read.response_tokens,
            response_tokens=read.response_tokens if step.stage == "evaluate" else 0,
            row_bytes=_SCORE_BYTES,
            remedy=remedy,
        )


_COSTS: dict[str, Callable[[_Costs, Step], Cost]] = {
    "prepare": _Costs._prepare,
    "sft": _Costs._sft,
    "generate": _Costs._generate,
    "score": _Costs._score,
    "train": _Costs._train,
    "evaluate": _Costs._evaluate,
}
