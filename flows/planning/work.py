"""Work of a run's steps: tokens that pass a model, and the memory of its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flows.pipeline.config import RunConfig
from flows.pipeline.step import Output, Step
from flows.planning.cost import DTYPE_BYTES, training_bytes
from flows.planning.sizes import (
    PROMPT_TOKENS,
    UnknownSizeError,
    count_parameters,
    read_parameters,
    rows_of,
)
from stages.contract.request import Resources
from stages.evaluate.params import EvaluateParams
from stages.generate.params import GenerateParams
from stages.score.params import ScoreParams
from stages.sft.params import SftParams
from stages.train.params import TrainParams

# Words of a vocabulary that a warm start from scratch makes.
_NEW_VOCABULARY = 1024
# Oracles that load no model and ask no server.
_LIGHT_ORACLES = frozenset({"python", "math_verify"})
_UNKNOWN_PROMPTS = (
    "the number of prompts is not known before `prepare` has read them: set "
    "estimation.prompts_per_iteration (or prepare.prompts_per_iteration)"
)


@dataclass(frozen=True)
class StepCost:
    """Cost of one step, whether or not the store has it.

    :class:`CostCounter` counts it; :mod:`flows.planning.estimate` adds what follows from devices.

    Attributes:
        tokens: Tokens that pass the model, each as often as it does.
        params: Parameters of the model; 0 without one.
        engine: Program that computes the model, and its type of numbers.
        operations: Operations on the model.
        memory: Bytes of one process for the parameters.
        unknown: Reason why the time is unknown.
        gpu_hours: Hours of all its GPUs.
        seconds: Wall time; None if nothing tells it.
        measured: The time follows from a measured rate.
    """

    tokens: float = 0.0
    params: int = 0
    engine: str = ""
    operations: float = 0.0
    memory: float = 0.0
    unknown: str = ""
    step: str = ""
    stage: str = ""
    gpu_hours: float = 0.0
    seconds: float | None = None
    measured: bool = False
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "tokens": self.tokens,
            "operations": self.operations,
            "memory_bytes": self.memory,
            "seconds": self.seconds,
            "measured": self.measured,
            "gpu_hours": self.gpu_hours,
            "warnings": self.warnings,
        }


def costs_of_steps(config: RunConfig, steps: Sequence[Step]) -> dict[str, StepCost]:
    """Tokens, operations and memory of each step of a run, by its name."""
    counter = CostCounter(config, steps)
    costs = {}
    for step in steps:
        try:
            costs[step.name] = counter.cost(step)
        except UnknownSizeError as error:
            costs[step.name] = StepCost(unknown=str(error))
    return costs


class CostCounter:
    """Counts prompts, and the tokens and operations of steps."""

    def __init__(self, config: RunConfig, steps: Sequence[Step]) -> None:
        self._config = config
        self._steps = {step.name: step for step in steps}
        # A configuration on record may name no prompts.
        self._data = rows_of(self._steps["prepare"].inputs.get("train", ()))
        mean = self._data.tokens if self._data else PROMPT_TOKENS
        self._prompt_tokens = min(mean, config.generate.max_length_tokens or mean)

    def cost(self, step: Step) -> StepCost:
        """Tokens, operations and memory of a step.

        Raises:
            UnknownSizeError: Its model or its rows cannot be counted.
        """
        match step.params:
            case SftParams() as params:
                data = rows_of(step.inputs["data"])
                if data is None:
                    raise UnknownSizeError("the rows of inputs.warm_start are not on this machine")
                tokens = params.epochs * data.number * data.tokens
                return self._trained(step, params, tokens)
            case TrainParams() as params:
                prompts = len(step.inputs["pairs"]) * self.train_prompts()
                # Rows are packed: a prompt counts once for both responses.
                responses = 2 * self._config.generate.counted_response_tokens
                tokens = prompts * self._config.pair.pairs_per_prompt
                tokens *= self._prompt_tokens + responses
                return self._trained(step, params, params.epochs * tokens, forward=tokens)
            case GenerateParams() as params:
                tokens = self._response_tokens(step)
                devices = params.vllm.tensor_parallel_size if params.backend == "vllm" else 1
                return self._passed(self._policy, params.dtype, tokens, params.backend, devices)
            case ScoreParams() as params:
                if not _LIGHT_ORACLES.issuperset(set(params.parts) - {params.needs.get("model")}):
                    raise UnknownSizeError(f"the time of the oracle {params.oracle} is unknown")
                if "model" in step.inputs:
                    [source] = step.inputs["model"]
                    assert not isinstance(source, Output)
                    model = read_parameters(source)
                    tokens = self._tokens_read(step, "responses")
                    return self._passed(model, params.reward_model.dtype, tokens)
            case EvaluateParams() as params if params.log_pi_ref != "off":
                tokens = self._tokens_read(step, "responses")
                if params.log_pi_ref == "both":
                    tokens += self._tokens_read(step, "base_responses")
                return self._passed(self._policy, params.dtype, tokens)
        return StepCost()

    def _passed(
        self, model: int, dtype: str, tokens: float, engine: str = "", devices: int = 1
    ) -> StepCost:
        """Cost of a model that tokens pass once, on devices that share its parameters."""
        memory = model * DTYPE_BYTES[dtype] / devices
        return StepCost(tokens, model, f"{engine} {dtype}", 2 * model * tokens, memory)

    def _trained(
        self, step: Step, params: SftParams | TrainParams, tokens: float, forward: float = 0
    ) -> StepCost:
        """Cost of the policy on tokens to train on, and on tokens that pass it once before."""
        resources: Resources = getattr(self._config.resources, step.stage)
        return StepCost(
            tokens=tokens + forward,
            params=self._policy,
            engine=f"zero {params.deepspeed.zero_stage} {params.precision}",
            operations=self._policy * (6 * tokens + 2 * forward),
            memory=training_bytes(self._policy, params, resources.world_size),
        )

    @cached_property
    def _policy(self) -> int:
        """Parameters of the policy: all policies of a run, and their references, have as many."""
        for step in self._steps.values():
            sources = step.inputs.get("policy")
            if sources and not isinstance(sources[0], Output):
                return read_parameters(sources[0])
        architecture = self._config.sft.architecture.model_dump()
        return count_parameters(architecture | {"vocab_size": _NEW_VOCABULARY})

    def train_prompts(self) -> float:
        """Prompts of one iteration; UnknownSizeError if nothing tells their number."""
        config = self._config
        part = config.prepare.prompts_per_iteration
        if self._data is None:
            assumed = config.estimation.prompts_per_iteration or part
            if assumed is None:
                raise UnknownSizeError(_UNKNOWN_PROMPTS)
            return assumed
        held_out = 0 if config.inputs.test_prompts else config.prepare.test_prompts
        here = max(self._data.number - held_out, 0) / config.iterations
        return min(here, part) if part else here

    def test_prompts(self, prepare: str = "prepare") -> float:
        """Prompts that a step holds out; UnknownSizeError if nothing tells their number."""
        inputs = self._steps[prepare].inputs
        test = rows_of(inputs.get("test", ()))
        if test is None and ("test" in inputs or "train" not in inputs):
            raise UnknownSizeError(f"the prompts of {prepare} are not on this machine")
        return test.number if test else self._config.prepare.test_prompts

    def _response_tokens(self, step: Step) -> float:
        """Tokens of the responses that a step samples, with the prompts'."""
        params = step.params
        [source] = step.inputs["prompts"]
        assert isinstance(params, GenerateParams)
        assert isinstance(source, Output)
        if source.path == "test.parquet":
            prompts = self.test_prompts(source.step)
        else:
            prompts = self.train_prompts()
        responses = prompts / params.num_shards * params.num_samples
        return responses * (self._prompt_tokens + params.counted_response_tokens)

    def _tokens_read(self, step: Step, name: str) -> float:
        """Tokens of the responses that a step reads, with the prompts'."""
        tokens = 0.0
        for source in step.inputs[name]:
            if isinstance(source, Output):
                tokens += self._response_tokens(self._steps[source.step])
        return tokens
