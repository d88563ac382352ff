"""Costs of a run's steps by their stage: models and tables that each reads, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flows.execution.plan import PlannedStep
from flows.pipeline.config import RunConfig
from flows.pipeline.placement import Execution
from flows.pipeline.step import Output, Source, Step
from flows.planning import sizes
from flows.planning.cost import Cost
from flows.planning.hardware import Device
from flows.planning.inference import forward_cost, generation_cost
from flows.planning.shape import ModelShape, new_model, read_shape
from flows.planning.sizes import Table, prepared
from flows.planning.training import Samples, training_cost
from stages.contract.params import StageParams
from stages.contract.request import Resources
from stages.contract.store import Artifact
from stages.contract.stores import open_store
from stages.evaluate.params import EvaluateParams
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.score.params import ORACLES, ScoreParams
from stages.sft.params import SftParams
from stages.train.params import TrainParams
from stages.training.params import TrainingParams

_SAVED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCORE_BYTES = 40
# A word-level tokenizer of a warm start from scratch has about so many words.
_NEW_VOCABULARY = 1024


class StepCosts:
    """Costs of a run's steps; knows the model of each checkpoint and the rows of each table.

    Args:
        config: The run's configuration.
        planned: Its plan, which says what the store has.
    """

    def __init__(self, config: RunConfig, planned: Sequence[PlannedStep]) -> None:
        self._config = config
        self._assumed = config.estimation
        self._store = open_store(config.store)
        self._planned = {each.step: each for each in planned}
        self._models: dict[str, ModelShape | str] = {}
        self._tables: dict[str, Table] = {}
        self._prompt_tokens = 0.0

    def of(
        self, step: Step, resources: Resources, device: Device, *, is_started: bool = False
    ) -> Cost:
        """Cost of a step, whether or not the store has it; to be asked in the steps' order.

        Args:
            step: The step.
            resources: Those of its stage.
            device: What each of its processes computes on.
            is_started: True for a step that another one's program computes with its engine.
        """
        cost = _COSTS.get(step.stage, StepCosts._light)(self, step, resources, device)
        if cost.seconds is None:
            return cost
        if is_started:
            return replace(cost, seconds=cost.seconds - cost.loading_seconds, loading_seconds=0.0)
        start = start_seconds(step.params, resources, self._config.execution)
        return replace(cost, seconds=cost.seconds + start)

    def _made(self, step: Step) -> Artifact | None:
        planned = self._planned[step.name]
        if planned.action == "run" or planned.key is None:
            return None
        return self._store.load(step.stage, planned.key)

    def _model(self, source: Source) -> ModelShape | str:
        if isinstance(source, Output):
            return self._models[source.step]
        return read_shape(source, self._store)

    def _read(self, step: Step, *names: str) -> Table:
        """All rows that a step reads under these names, as of one table."""
        sources = [each for name in names for each in step.inputs[name]]
        tables = [self._tables[each.step] for each in sources if isinstance(each, Output)]
        rows = sum(each.rows for each in tables)
        tokens = sum(each.rows * each.response_tokens for each in tables)
        return Table(rows, tokens / max(rows, 1), sum(each.prompts for each in tables))

    def _light(self, step: Step, resources: Resources, device: Device) -> Cost:
        """Stages without a model; those that read responses make a row of each prompt's, or n."""
        if "responses" in step.inputs:
            read = self._read(step, "responses")
            made = read.prompts
            if isinstance(step.params, PairParams):
                made *= step.params.pairs_per_prompt
            self._tables[step.name] = replace(read, rows=made)
        return Cost(seconds=0.0)

    def _prepare(self, step: Step, resources: Resources, device: Device) -> Cost:
        found = prepared(self._config, step, self._made(step))
        self._tables |= found.tables
        if found.prompt_tokens is not None:
            self._prompt_tokens = found.prompt_tokens
        return Cost(seconds=0.0, notes=found.notes)

    def _sft(self, step: Step, resources: Resources, device: Device) -> Cost:
        params = step.params
        assert isinstance(params, SftParams)
        given = step.inputs.get("policy", ())
        shape = self._model(given[0]) if given else new_model(params.architecture, _NEW_VOCABULARY)
        self._models[step.name] = shape
        data = sizes.rows_of(step.inputs["data"])
        if isinstance(shape, str):
            return Cost(notes=(shape,))
        if data is None:
            return Cost(notes=("the rows of inputs.warm_start are not on this machine",))
        longest = params.max_length_tokens or shape.context or data.tokens
        tokens = min(data.tokens, longest)
        samples = Samples(data.number, tokens, tokens / 2, params.global_batch_rows, False)
        saved = _SAVED_BYTES.get(params.save_dtype, shape.dtype_bytes)
        return training_cost(
            shape, params, resources, device, samples, self._assumed, save_bytes=saved
        )

    def _generate(self, step: Step, resources: Resources, device: Device) -> Cost:
        params = step.params
        assert isinstance(params, GenerateParams)
        source = step.inputs["prompts"][0]
        assert isinstance(source, Output)
        prompts = self._tables[source.path if source.step == "prepare" else source.step].rows
        prompts /= params.num_shards
        made = self._made(step)
        self._tables[step.name] = (
            sizes.made_responses(made)
            if made is not None
            else Table(prompts * params.num_samples, params.counted_response_tokens, prompts)
        )
        if params.backend == "openai":
            return Cost(notes=("a server samples (generate.backend=openai)",))
        shape = self._model(step.inputs["policy"][0])
        if isinstance(shape, str):
            return Cost(notes=(shape,))
        return generation_cost(
            shape,
            params,
            resources,
            device,
            self._assumed,
            prompts=prompts,
            prompt_tokens=self._prompt_tokens,
            response_tokens=self._tables[step.name].response_tokens,
        )

    def _score(self, step: Step, resources: Resources, device: Device) -> Cost:
        params = step.params
        assert isinstance(params, ScoreParams)
        responses = step.inputs["responses"][0]
        assert isinstance(responses, Output)
        table = self._tables[step.name] = self._tables[responses.step]
        if "model" not in step.inputs:
            return Cost(
                seconds=0.0 if LIGHT_ORACLES.issuperset(params.parts) else None,
                disk=table.rows * _SCORE_BYTES,
            )
        shape = self._model(step.inputs["model"][0])
        if isinstance(shape, str):
            return Cost(notes=(shape,))
        section = ORACLES[params.needs["model"]].section
        settings = getattr(params, section)
        cost = forward_cost(
            shape,
            resources,
            device,
            self._assumed,
            dtype=settings.dtype,
            batch_tokens=settings.tokens_per_batch,
            sequences=table.rows,
            sequence_tokens=self._prompt_tokens + table.response_tokens,
            response_tokens=0,
            row_bytes=_SCORE_BYTES,
            remedy=f"lower score.{section}.tokens_per_batch, or set score.{section}.dtype=bfloat16",
        )
        # Nothing tells how long a server takes that is asked beside the model.
        others = set(params.parts) - {params.needs["model"]}
        return cost if LIGHT_ORACLES.issuperset(others) else replace(cost, seconds=None)

    def _train(self, step: Step, resources: Resources, device: Device) -> Cost:
        params = step.params
        assert isinstance(params, TrainParams)
        shape = self._model(step.inputs["policy"][0])
        self._models[step.name] = shape
        if isinstance(shape, str):
            return Cost(notes=(shape,))
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
        saved = _SAVED_BYTES.get(params.save_dtype, shape.dtype_bytes)
        return training_cost(
            shape,
            params,
            resources,
            device,
            samples,
            self._assumed,
            save_bytes=saved,
            writes_average=params.reference == "ema",
        )

    def _evaluate(self, step: Step, resources: Resources, device: Device) -> Cost:
        params = step.params
        assert isinstance(params, EvaluateParams)
        if params.log_pi_ref == "off":
            return Cost(seconds=0.0)
        shape = self._model(step.inputs["reference"][0])
        if isinstance(shape, str):
            return Cost(notes=(shape,))
        sides = ["responses", "base_responses"] if params.log_pi_ref == "both" else ["responses"]
        read = self._read(step, *sides)
        return forward_cost(
            shape,
            resources,
            device,
            self._assumed,
            dtype=params.dtype,
            batch_tokens=params.batch_tokens,
            sequences=read.rows,
            sequence_tokens=self._prompt_tokens + read.response_tokens,
            response_tokens=read.response_tokens,
            row_bytes=_SCORE_BYTES,
            remedy="lower evaluate.batch_tokens, or set evaluate.dtype=bfloat16 or "
            "evaluate.log_pi_ref=off",
        )


_COSTS: dict[str, Callable[[StepCosts, Step, Resources, Device], Cost]] = {
    "prepare": StepCosts._prepare,
    "sft": StepCosts._sft,
    "generate": StepCosts._generate,
    "score": StepCosts._score,
    "train": StepCosts._train,
    "evaluate": StepCosts._evaluate,
}


_LIGHT_START_SECONDS = 2.0
"""Start of a stage that loads no torch, and its work."""
_START_SECONDS = 8.0
"""Start of a program that loads torch and transformers."""
_FORK_SECONDS = 0.5
"""Start of a stage as a fork of a process that has loaded its libraries."""
_VLLM_START_SECONDS = 60.0
"""Start of vLLM's engine, graphs captured."""
LIGHT_ORACLES = frozenset({"python", "math_verify"})
"""Oracles that load no model and ask no server."""


def start_seconds(params: StageParams, resources: Resources, execution: Execution) -> float:
    """Seconds from the start of a stage's program to its work.

    Args:
        params: The stage's parameters.
        resources: Those of the stage.
        execution: Place and manner in which the run starts its stages.
    """
    if params.image_for(from_hub=False) == "vllm":
        return _VLLM_START_SECONDS
    workers = _START_SECONDS if _starts_workers(params, resources) else 0.0
    if execution.runner == "process" and execution.fork_server and not resources.gpus:
        return _FORK_SECONDS + workers
    light = isinstance(params, ScoreParams) and LIGHT_ORACLES.issuperset(params.parts)
    loads_torch = params.image == "torch" and not light
    return (_START_SECONDS if loads_torch else _LIGHT_START_SECONDS) + workers


def _starts_workers(params: StageParams, resources: Resources) -> bool:
    """True where a training is in processes below the stage's own."""
    return isinstance(params, TrainingParams) and (
        (resources.gpus or resources.processes) * resources.nodes > 1 or params.needs_workers
    )
