"""Parameters of the score stage: the table of oracles, and a field for the settings of each.

To add an oracle: a section and the oracle's name in :mod:`stages.score.settings`, a row in
:data:`ORACLES` and the section's field here; and the module with its ``load(ctx) -> Oracle``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.contract.params import StageParams, speed_only
from stages.contract.signature import ImageName, InputSpec, OutputSpec
from stages.score.settings import (
    HttpSettings,
    IfevalSettings,
    JudgeSettings,
    MathVerifySettings,
    PartName,
    PythonSettings,
    RewardModelSettings,
    UrmSettings,
    WeightedSettings,
)

VOTES = "votes"
"""Component of `math_verify`: samples of the prompt that give an equal answer; 0 for none."""


@dataclass(frozen=True)
class OracleEntry:
    """One oracle.

    Attributes:
        module: Module with its ``load(ctx) -> Oracle``; imported only when it is used, since some
            need torch.
        section: Field of :class:`ScoreParams` that holds its settings.
        needs: Inputs of the stage that it cannot do without.
        takes: Inputs that it reads where they are given.
    """

    module: str
    section: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


ORACLES: Mapping[str, OracleEntry] = {
    "python": OracleEntry("stages.score.python_function", "python", needs=("code",)),
    "reward_model": OracleEntry("stages.score.reward_model", "reward_model", needs=("model",)),
    "urm_gated": OracleEntry("stages.score.urm_oracles", "urm", needs=("model",)),
    "urm_helpfulness": OracleEntry("stages.score.urm_oracles", "urm", needs=("model",)),
    "math_verify": OracleEntry("stages.score.math_answers", "math_verify"),
    "http": OracleEntry("stages.score.reward_server", "http"),
    "judge": OracleEntry("stages.score.judge", "judge", takes=("code",)),
    "ifeval": OracleEntry("stages.score.ifeval", "ifeval"),
    "weighted": OracleEntry("stages.score.weighted", "weighted"),
}


class ScoreParams(StageParams):
    """Scores every response with one oracle, or with several that are summed."""

    stage: ClassVar[str] = "score"
    version: ClassVar[str] = "1"
    inputs = {
        "responses": InputSpec("responses"),
        "opponents": InputSpec("responses", optional=True),
        "model": InputSpec("model", optional=True),
        "code": InputSpec("file", optional=True),
    }
    outputs = {
        "scores.parquet": OutputSpec("scores"),
        "metrics.json": OutputSpec("file"),
        "costs.json": OutputSpec("file", optional=True),
    }
    image = "torch"

    oracle: Literal[PartName, "ifeval", "weighted"] = "reward_model"
    """Oracle: a function of a Python file (`python`, input ``code``), a sequence classifier
    (`reward_model`, input ``model``), the URM reward model by its gated score or its helpfulness
    mean (`urm_gated`, `urm_helpfulness`, input ``model``), the comparison of the final answer with
    the prompt's reference answer (`math_verify`), a server of your own (`http`), a chat model
    (`judge`), lm-eval's checks of verifiable instructions (`ifeval`), or a weighted sum of several
    (`weighted`). Only its own section is read, and those of the oracles that it sums. See
    docs/oracles.md."""
    max_null_share: float = Field(0.0, ge=0, le=1)
    """Share of responses that may go without a score before the stage fails."""
    rows_per_batch: int = speed_only(
        4096, ge=1, description="Responses held in memory and given to the oracle at once."
    )
    python: PythonSettings = PythonSettings()
    """Settings of the oracle `python`."""
    reward_model: RewardModelSettings = RewardModelSettings()
    """Settings of the oracle `reward_model`."""
    urm: UrmSettings = UrmSettings()
    """Settings of the oracles `urm_gated` and `urm_helpfulness`."""
    math_verify: MathVerifySettings = MathVerifySettings()
    """Settings of the oracle `math_verify`."""
    http: HttpSettings = HttpSettings()
    """Settings of the oracle `http`."""
    judge: JudgeSettings = JudgeSettings()
    """Settings of the oracle `judge`."""
    ifeval: IfevalSettings = IfevalSettings()
    """Settings of the oracle `ifeval`; there are none."""
    weighted: WeightedSettings = WeightedSettings()
    """Settings of the oracle `weighted`."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the oracles that score: several where a weighted sum is the oracle."""
        return tuple(self.weighted.weights) if self.oracle == "weighted" else (self.oracle,)

    @property
    def needs(self) -> Mapping[str, str]:
        """Inputs that the oracles cannot do without, and the oracle that needs each."""
        return {name: part for part in self.parts for name in ORACLES[part].needs}

    def reads(self, name: str) -> bool:
        """True where an oracle has a use for an input of this name."""
        return name in self.needs or any(name in ORACLES[part].takes for part in self.parts)

    def unused_fields(self) -> frozenset[str]:
        """The sections of the other oracles."""
        used = {ORACLES[name].section for name in (self.oracle, *self.parts)}
        return frozenset(each.section for each in ORACLES.values()) - used

    def image_for(self, *, from_hub: bool) -> ImageName:
        """Image with vLLM where that is the engine, with lm-eval's code for its checks."""
        if self.oracle == "ifeval":
            return "eval"
        in_vllm = "reward_model" in self.parts and self.reward_model.engine == "vllm"
        return "vllm" if in_vllm else self.image

    @property
    def compares(self) -> bool:
        """True where scores only rank responses against each other."""
        judge = self.judge
        pairwise = judge.mode == "pairwise" and judge.against == "samples"
        return "judge" in self.parts and pairwise

    @model_validator(mode="after")
    def _server_is_named(self) -> ScoreParams:
        if "http" in self.parts and not (self.http.url and self.http.identity):
            raise ValueError(
                "the oracle http needs http.url and http.identity: the address to post to, and the "
                "name and version that the server gives as its own"
            )
        if "judge" in self.parts and not (self.judge.url and self.judge.model):
            raise ValueError(
                "the oracle judge needs judge.url and judge.model: the address of the chat "
                "completions (…/v1/chat/completions), and the model's name at the server"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit_together(self) -> ScoreParams:
        if self.oracle == "weighted" and not self.parts:
            raise ValueError(
                "the oracle weighted needs weighted.weights: the weight of each oracle that it "
                "sums, such as {reward_model: 1, python: -0.5}"
            )
        for part in self.parts:
            for name in ORACLES[part].needs:
                if self.needs[name] != part:
                    raise ValueError(
                        f"weighted.weights has {part} and {self.needs[name]}, which both need the "
                        f"input `{name}`, and a run has one: leave one of them out"
                    )
        if "math_verify" in self.parts and self.image_for(from_hub=False) == "vllm":
            raise ValueError(
                "weighted.weights has math_verify, and reward_model.engine is 'vllm', whose "
                "environment does not hold math-verify: set reward_model.engine to 'transformers'"
            )
        return self
