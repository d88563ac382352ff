"""Parameters of the train stage. Defaults are from the paper's published code."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from stages.contract.params import InputSpec, OutputSpec, OwnFunction, Settings
from stages.objectives.params import KappaParams, ObjectiveParams
from stages.training.params import TrainingParams


class LengthParams(Settings):
    """Limits of length. A warning counts the rows beyond them."""

    max_length_tokens: int = Field(2048, ge=2)
    """Most tokens of a prompt with one response."""
    max_prompt_tokens: int = Field(1000, ge=1)
    """Tokens to which the prompt of an over-long pair is cut, its last ones; its responses keep
    their first tokens."""

    @model_validator(mode="after")
    def _lengths_leave_room_for_a_response(self) -> Self:
        if self.max_prompt_tokens >= self.max_length_tokens:
            raise ValueError(
                f"max_prompt_tokens = {self.max_prompt_tokens} leaves no room for a response "
                f"within max_length_tokens = {self.max_length_tokens}"
            )
        return self


class OwnObjective(OwnFunction):
    """Terms of the objective by a function of a Python file."""

    function: str = "objective"
    """Name of the function in ``code``, `(chosen, rejected, **settings) -> {"loss": …, "bonus":
    …}`: both [B], or one of them; what it leaves out is as the other settings say."""


# Designs of log π − log π_ref: their bonus is 0 at the first step, where the two are the same.
_ZERO_AT_FIRST = ("feb", "selm", "vpo", "se_popo")
# Names of losses without a bonus, as their papers have them.
_LOSS_NAMES = {"sigmoid": "f-DPO", "ipo": "IPO"}


class TrainParams(TrainingParams, LengthParams, KappaParams, ObjectiveParams):
    """Trains a policy on preference pairs by f-DPO with an exploratory bonus.

    Inputs: `policy` (model to start from), `reference` (model of π_ref), `pairs` (1..n tables)
    and `code`, the file of an objective of the user's. Outputs: `checkpoint/`,
    `reference_logprobs.parquet`, `summary.json`, `metrics.jsonl`.
    """

    stage: ClassVar[str] = "train"
    version: ClassVar[str] = "7"
    inputs = {
        "policy": InputSpec(),
        "reference": InputSpec(),
        "pairs": InputSpec(many=True),
        "code": InputSpec(optional=True),
    }
    outputs = {
        "checkpoint": OutputSpec("model"),
        "reference_logprobs.parquet": OutputSpec("file"),
        "summary.json": OutputSpec("file"),
        "metrics.jsonl": OutputSpec("file"),
    }
    image = "torch"
    late_modules = ("stages.train.fit", "deepspeed", "peft")

    objective: Literal["geb", "python"] = "geb"
    """`geb`: loss and bonus of the settings. `python`: a function of a Python file gives loss,
    bonus or both (input ``code``, section `python`; docs/research.md)."""
    python: OwnObjective = OwnObjective()
    """Settings of the objective `python`."""
    global_batch_pairs: int = Field(256, ge=1)
    """Pairs per optimizer step, over all processes. An epoch's last batch may be smaller."""
    reference: Literal["previous", "initial"] = "previous"
    """Model of the `reference` input: the previous iteration's, or the initial one."""

    @property
    def has_bonus(self) -> bool:
        """True if κ has something to weigh."""
        return self.design != "none" or self.objective == "python"

    @property
    def method(self) -> str:
        """Name of loss and bonus, for a person."""
        if self.objective == "python":
            return self.python.function
        if self.design == "none":
            return _LOSS_NAMES[self.loss]
        return self.design if self.loss == "sigmoid" else f"{self.design} + {self.loss}"

    def unused_fields(self) -> frozenset[str]:
        """The section of a function that is not called."""
        return frozenset() if self.objective == "python" else frozenset({"python"})

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if (
            self.target_ratio is not None
            and self.objective == "geb"
            and self.design in _ZERO_AT_FIRST
        ):
            raise ValueError(
                f"target_ratio = {self.target_ratio} with design = {self.design!r}: its bonus is 0 "
                "where the policy is the reference, and no κ gives a ratio to 0; set train.kappa "
                "in place of train.target_ratio"
            )
        return self
