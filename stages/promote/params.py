"""Parameters of the promote stage."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, StringConstraints

from stages.contract.params import InputSpec, OutputSpec, StageParams
from stages.store.registry import require_alias

ModelName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]


class PromoteParams(StageParams):
    """The gates that a checkpoint must pass, and the aliases that move when it does."""

    stage: ClassVar[str] = "promote"
    version: ClassVar[str] = "6"
    inputs = {
        "checkpoint": InputSpec(),
        "metrics": InputSpec(),
        "suite_metrics": InputSpec(many=True, optional=True),
    }
    outputs = {
        "decision.json": OutputSpec("file"),
    }
    writes_registry = True

    model_name: ModelName | None = None
    """Name under which checkpoints are registered; a run fills in its own name if this is null.
    Every checkpoint becomes a version of the model, and the alias `latest` means the newest one,
    whatever the gates say."""

    measured_by: str = ""
    """Digest of the oracle, the sampling and the source of the prompts of ``metrics``; only figures
    with the same one are compared. A run fills it in."""

    iteration: int = 0
    """Iteration of the checkpoint in its run; 0 outside of iterations. A run fills it in."""

    aliases: tuple[Annotated[str, AfterValidator(require_alias)], ...] = ("production",)
    """Aliases that move to the checkpoint when it passes all gates."""

    better_than_base_confidence: float | None = Field(0.95, gt=0.5, lt=1.0)
    """Confidence with which the model must win more of the test prompts than it loses to the base
    model: the lower bound of its share of the prompts that do not tie (one-sided, by Wilson's
    interval) must be above ½. Null promotes what nothing shows to be better."""

    min_win_rate: float | None = Field(None, ge=0.0, le=1.0)
    """Smallest win rate against the base model, ties counted as lost; null sets no gate."""

    max_regression: float | None = Field(0.0, ge=0.0)
    """Largest fall of the mean reward, in the oracle's units, below the version that an alias holds
    now, whichever run registered it; null sets no gate. The lower bound of the difference must be
    at least minus this (one-sided, with the confidence `better_than_base_confidence`; if that is
    null, the difference itself counts). It fails if that version has no figures by the same oracle,
    sampling and prompts. An alias that holds nothing asks for nothing."""

    suites_hold: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Gates by the names of suites: the suite's mean reward must not fall below the base model's by
    more than this, in the suite's oracle's units; with confidence, as `max_regression`."""
