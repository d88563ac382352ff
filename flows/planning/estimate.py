"""Estimate of a run: the cost of each of its steps, what the store saves, and what cannot fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatchmethod
from typing import NamedTuple

from flows.execution.plan import PlannedStep
from flows.pipeline.algorithm import all_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.step import Output, Source, Step
from flows.planning import sizes
from flows.planning.cost import (
    GIB,
    GPUS,
    Cost,
    Device,
    Work,
    forward_cost,
    generation_cost,
    this_cpu,
    training_cost,
)
from flows.planning.sizes import ModelShape
from stages.contract.params import StageParams
from stages.contract.request import Resources
from stages.evaluate.params import EvaluateParams
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.preferences.params import PreferencesParams
from stages.prepare.params import PrepareParams
from stages.score.params import ORACLES, ScoreParams
from stages.sft.params import SftParams
from stages.store.opening import open_store
from stages.train.params import TrainParams

# Start of a step's program; vLLM's with its graphs.
_START_SECONDS = 2.0
_VLLM_START_SECONDS = 60.0
_SMALLER_TRAINING = (
    "set {0}.deepspeed.zero_stage=3, {0}.gradient_checkpointing=true, a lower "
    "{0}.micro_batch_tokens, {0}.deepspeed.offload_optimizer=true, {0}.lora.rank, or more "
    "devices in resources.{0}"
)
# Settings to change if a stage does not fit its device.
_REMEDIES = {
    "sft": _SMALLER_TRAINING,
    "train": _SMALLER_TRAINING,
    "generate": "raise {0}.vllm.tensor_parallel_size, or lower {0}.transformers.batch_size",
    "score": "lower tokens_per_batch of the model's section in {0}, or set its dtype to bfloat16",
    "evaluate": "lower {0}.batch_tokens, or set {0}.dtype=bfloat16 or {0}.log_pi_ref=off",
}
# Oracles that load no model and ask no server.
_LIGHT_ORACLES = frozenset({"python", "math_verify"})


@dataclass(frozen=True)
class StepEstimate:
    """Cost of one step, whether or not the store has it.

    Attributes:
        processes: Processes that share the work, on all nodes.
        device: What each process computes on.
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
    """Cost of a run: its steps, in an order in which they could be computed.

    ``seconds`` is the wall time of those that the store lacks.
    """

    steps: tuple[StepEstimate, ...]
    seconds: float
    price_per_gpu_hour: float | None

    @property
    def warnings(self) -> list[str]:
        """Warnings of the steps that the store lacks, each once."""
        lacking = [each for each in self.steps if not each.cached]
        return list(dict.fromkeys(said for each in lacking for said in each.warnings))

    @property
    def uncounted(self) -> list[str]:
        """Steps that the store lacks and whose time is not known: no sum has them."""
        return [each.step for each in self.steps if not each.cached and each.cost.seconds is None]

    def gpu_hours(self, *, cached: bool) -> float:
        """GPU-hours of the steps that the store has, or lacks."""
        return sum(each.gpu_hours for each in self.steps if each.cached == cached)

    def price(self, gpu_hours: float) -> float | None:
        """Money for GPU-hours, if the configuration names a price."""
        return None if self.price_per_gpu_hour is None else self.price_per_gpu_hour * gpu_hours


def estimate(
    config: RunConfig, planned: Sequence[PlannedStep], steps: Sequence[Step] | None = None
) -> Estimate:
    """Estimates a run without starting anything.

    The plan says what the store has. ``steps`` are given if inputs from outside are not to be
    looked for.
    """
    cached = {each.step for each in planned if each.action == "reuse"}
    taken = all_steps(config) if steps is None else steps
    costs = _Costs(config)
    found = [costs.estimate(each, cached=each.name in cached) for each in taken]
    lasting = {each.step: each.cost.seconds or 0.0 for each in found if not each.cached}
    upstream = {each.name: each.upstream() for each in taken}
    return Estimate(
        tuple(found),
        wall_seconds(lasting, upstream, config.execution.parallel),
        config.estimation.price_per_gpu_hour,
    )


def wall_seconds(
    seconds: Mapping[str, float], upstream: Mapping[str, Sequence[str]], parallel: int
) -> float:
    """Wall time of steps: as the longest chain lasts, or all of them ``parallel`` at a time.

    Inputs come before the steps that read them; a step without a time is in the store.
    """
    ends: dict[str, float] = {}
    for name, own in seconds.items():
        ends[name] = own + max((ends.get(each, 0.0) for each in upstream.get(name, ())), default=0)
    return max([sum(seconds.values()) / parallel, *ends.values()])


def _too_large(step: Step, cost: Cost, resources: Resources, device: Device) -> list[str]:
    """A warning if a process does not fit its device, or all do not fit this machine."""
    local = 1 if device.is_gpu else resources.processes
    if cost.memory * local <= device.memory:
        return []
    place = f"a {device.name}" if device.is_gpu else "this machine"
    each = "" if local == 1 else f" in each of {local} processes"
    remedy = _REMEDIES[step.stage].format(step.stage)
    return [
        f"{step.stage} does not fit: it takes {cost.memory / GIB:.1f} GiB{each}, and "
        f"{place} has {device.memory / GIB:.1f}: {remedy}"
    ]


class _Table(NamedTuple):
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
        self._models: dict[str, ModelShape] = {}
        self._unknown: dict[str, str] = {}
        self._tables: dict[str, _Table] = {}
        self._prompt_tokens = 0.0

    def estimate(self, step: Step, *, cached: bool) -> StepEstimate:
        """Estimates a step, whether or not the store has it."""
        resources, device = self._place(step)
        try:
            cost = self._cost(step.params, step)
        except sizes.UnknownModelError as error:
            self._unknown[step.name] = str(error)
            cost = Cost(notes=(str(error),))
        if cost.seconds is not None:
            vllm = step.params.image_for(from_hub=False) == "vllm"
            start = _VLLM_START_SECONDS if vllm else _START_SECONDS
            cost = replace(cost, seconds=cost.seconds + start)
        return StepEstimate(
            step=step.name,
            stage=step.stage,
            cached=cached,
            processes=resources.devices * resources.nodes,
            gpus=resources.gpus * resources.nodes,
            device=device.name,
            cost=cost,
            warnings=(*_too_large(step, cost, resources, device), *cost.notes),
        )

    def _place(self, step: Step) -> tuple[Resources, Device]:
        resources: Resources = getattr(self._config.resources, step.stage)
        gpu = GPUS[self._config.estimation.hardware]
        return resources, gpu if resources.gpus else this_cpu(resources.cpus)

    def _model(self, source: Source) -> ModelShape:
        if isinstance(source, Output):
            if source.step in self._unknown:
                raise sizes.UnknownModelError(self._unknown[source.step])
            return self._models[source.step]
        return sizes.read_shape(source, self._store)

    def _read(self, step: Step, *names: str) -> _Table:
        """All rows that a step reads under these names, as of one table."""
        sources = [each for name in names for each in step.inputs[name]]
        tables = [self._tables[each.step] for each in sources if isinstance(each, Output)]
        rows = sum(each.rows for each in tables)
        tokens = sum(each.rows * each.response_tokens for each in tables)
        return _Table(rows, tokens / max(rows, 1), sum(each.prompts for each in tables))

    @singledispatchmethod
    def _cost(self, params: StageParams, step: Step) -> Cost:
        """Stages without a model; `pair` and others make rows of each prompt's responses."""
        if "responses" in step.inputs:
            read = self._read(step, "responses")
            times = params.pairs_per_prompt if isinstance(params, PairParams) else 1
            self._tables[step.name] = read._replace(rows=read.prompts * times)
        return Cost(seconds=0.0)

    @_cost.register
    def _prepare(self, params: PrepareParams, step: Step) -> Cost:
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

    @_cost.register
    def _sft(self, params: SftParams, step: Step) -> Cost:
        given = step.inputs.get("policy")
        shape = self._model(given[0]) if given else sizes.new_model(params.architecture)
        self._models[step.name] = shape
        data = sizes.rows_of(step.inputs["data"])
        if data is None:
            return Cost(notes=("the rows of inputs.warm_start are not on this machine",))
        tokens = min(data.tokens, params.max_length_tokens or data.tokens)
        work = Work(data.number, tokens, tokens / 2)
        batch = params.global_batch_rows
        return training_cost(shape, params, *self._place(step), work, batch, False)

    @_cost.register
    def _train(self, params: TrainParams, step: Step) -> Cost:
        shape = self._models[step.name] = self._model(step.inputs["policy"][0])
        pairs = self._read(step, "pairs")
        prompt = min(self._prompt_tokens, params.max_prompt_tokens)
        responses = 2 * min(pairs.response_tokens, params.max_length_tokens - prompt)
        times = 1 if params.row_layout == "packed" else 2
        work = Work(pairs.rows, times * prompt + responses, responses)
        batch, reference = params.global_batch_pairs, params.reference_logprobs == "model"
        return training_cost(shape, params, *self._place(step), work, batch, reference)

    @_cost.register
    def _generate(self, params: GenerateParams, step: Step) -> Cost:
        prompts = self._prompts(step) / params.num_shards
        tokens = params.counted_response_tokens
        self._tables[step.name] = _Table(prompts * params.num_samples, tokens, prompts)
        work = Work(prompts, self._prompt_tokens, tokens)
        return generation_cost(
            self._model(step.inputs["policy"][0]), params, self._place(step)[1], work
        )

    def _prompts(self, step: Step) -> float:
        [source] = step.inputs["prompts"]
        assert isinstance(source, Output)
        return self._tables[source.path if source.step == "prepare" else source.step].rows

    @_cost.register
    def _preferences(self, params: PreferencesParams, step: Step) -> Cost:
        """One pair for each prompt, of responses as long as those that are sampled."""
        rows = self._prompts(step)
        tokens = self._config.generate.counted_response_tokens
        self._tables[step.name] = _Table(rows, tokens, rows)
        return Cost(seconds=0.0)

    @_cost.register
    def _score(self, params: ScoreParams, step: Step) -> Cost:
        table = self._tables[step.name] = self._read(step, "responses")
        if "model" not in step.inputs:
            known = _LIGHT_ORACLES.issuperset(params.parts)
            return Cost(seconds=0.0 if known else None)
        settings = getattr(params, ORACLES[params.needs["model"]].section)
        cost = forward_cost(
            self._model(step.inputs["model"][0]),
            *self._place(step),
            Work(table.rows, self._prompt_tokens + table.response_tokens, 0),
            settings.dtype,
            settings.tokens_per_batch,
        )
        # Nothing tells how long a server takes that is asked beside the model.
        others = set(params.parts) - {params.needs["model"]}
        return cost if _LIGHT_ORACLES.issuperset(others) else replace(cost, seconds=None)

    @_cost.register
    def _evaluate(self, params: EvaluateParams, step: Step) -> Cost:
        if params.log_pi_ref == "off":
            return Cost(seconds=0.0)
        sides = ["responses", "base_responses"] if params.log_pi_ref == "both" else ["responses"]
        read = self._read(step, *sides)
        return forward_cost(
            self._model(step.inputs["reference"][0]),
            *self._place(step),
            Work(read.rows, self._prompt_tokens + read.response_tokens, read.response_tokens),
            params.dtype,
            params.batch_tokens,
        )
