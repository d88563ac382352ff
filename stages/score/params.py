"""Parameters of the score stage: the table of oracles, and a section of settings for each.

CONTRIBUTING.md tells how to add an oracle. Flows import this: pydantic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from stages.contract.number_types import NumberType
from stages.contract.params import (
    InputSpec,
    OutputSpec,
    Settings,
    StageParams,
    speed_only,
)

PartName = Literal[
    "python", "reward_model", "urm_gated", "urm_helpfulness", "math_verify", "http", "judge"
]
"""Oracles that `weighted` can sum."""


class PythonSettings(Settings):
    """A function of a Python file."""

    function: str = "score"
    """Name of the function in ``code``, ``(prompts, responses, references) -> scores``."""


class ClassifierSettings(Settings):
    """Settings that all reward models loaded by the stage share."""

    dtype: NumberType = "auto"
    """Type of weights and activations; `auto` as for `generate.dtype`."""
    max_length_tokens: int | None = Field(None, ge=1)
    """Longest conversation that is read, in tokens; unset takes the model's. A longer one gets no
    score."""
    tokens_per_batch: int = speed_only(
        16384, ge=1, description="Tokens, padding included, in one pass of transformers."
    )


class ServerSettings(Settings):
    """Address of a server, and the patience with which it is asked."""

    url: str | None = speed_only(None, description="Address to post to.")
    key_env: str | None = speed_only(
        None,
        description="Name of the environment variable that holds the bearer token; unset sends "
        "none.",
    )
    concurrency: int = speed_only(8, ge=1, description="Requests at once.")
    timeout_seconds: float = speed_only(120.0, gt=0, description="Time limit of one request.")

    @model_validator(mode="after")
    def _check_url(self) -> ServerSettings:
        # The section fails, not the field, whose value the message would quote.
        parts = urlsplit(self.url or "http://unset")
        if "@" in parts.netloc:
            raise ValueError("url holds a password: set key_env instead (docs/oracles.md)")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("url is not a server's address: write http://HOST… or https://HOST…")
        return self


class HttpSettings(ServerSettings):
    """A custom reward server."""

    identity: str | None = None
    """Name and version that the server must give as its own."""
    rows_per_request: int = speed_only(32, ge=1, description="Responses in one request.")


class JudgeSettings(ServerSettings):
    """A chat model at an OpenAI-compatible address."""

    model: str | None = None
    """The model's name at the server."""
    mode: Literal["scored", "pairwise"] = "scored"
    """Mark each response by itself, or compare two and score by the comparisons won, each of them
    in both orders."""
    against: Literal["samples", "reference"] = "samples"
    """Pairwise: compare each response with the prompt's next two samples, in an evaluation with the
    base's, or with the prompt's reference answer: a baseline's, such as AlpacaEval's."""
    marks: tuple[float, float] = (1.0, 10.0)
    """Scored: the lowest mark, and the highest."""
    max_tokens: int = Field(512, ge=1)
    """Longest answer of the judge, in tokens."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request; null takes one out. OpenAI's reasoning models need
    `{temperature: null, max_tokens: null, max_completion_tokens: 4096}`."""

    @model_validator(mode="after")
    def _check_mode(self) -> JudgeSettings:
        lowest, highest = self.marks
        if not lowest < highest:
            raise ValueError("marks are not the lowest mark, then the highest: correct their order")
        if self.against == "reference" and self.mode != "pairwise":
            raise ValueError("against is 'reference', and mode is not: set mode to pairwise")
        return self


class WeightedSettings(Settings):
    """A weighted sum of other oracles' scores."""

    weights: dict[PartName, float] = Field(default_factory=dict)
    """Weight of each oracle by its name; a negative one is a penalty. Each oracle reads its own
    section."""


@dataclass(frozen=True)
class OracleEntry:
    """One oracle."""

    module: str
    """Module with its ``load(ctx) -> Oracle``; imported only when it is used, since some need
    torch."""
    section: str = ""
    """Field of :class:`ScoreParams` that holds its settings; empty if it has none."""
    needs: tuple[str, ...] = ()
    """Inputs of the stage that it cannot do without."""
    takes: tuple[str, ...] = ()
    """Inputs that it reads if they are given."""


ORACLES: Mapping[str, OracleEntry] = {
    "python": OracleEntry("stages.score.python_function", "python", needs=("code",)),
    "reward_model": OracleEntry("stages.score.reward_model", "reward_model", needs=("model",)),
    "urm_gated": OracleEntry("stages.score.urm_oracles", "reward_model", needs=("model",)),
    "urm_helpfulness": OracleEntry("stages.score.urm_oracles", "reward_model", needs=("model",)),
    "math_verify": OracleEntry("stages.score.math_answers"),
    "http": OracleEntry("stages.score.reward_server", "http"),
    "judge": OracleEntry("stages.score.judge", "judge", takes=("code",)),
    "weighted": OracleEntry("stages.score.weighted", "weighted"),
}


class ScoreParams(StageParams):
    """Scores every response with one oracle, or with several that are summed."""

    stage: ClassVar[str] = "score"
    version: ClassVar[str] = "2"
    inputs = {
        "responses": InputSpec(),
        "opponents": InputSpec(optional=True),
        "model": InputSpec(optional=True),
        "code": InputSpec(optional=True),
    }
    outputs = {
        "scores.parquet": OutputSpec("scores"),
        "metrics.json": OutputSpec("file"),
    }
    image = "torch"

    oracle: Literal[PartName, "weighted"] = "reward_model"
    """Oracle: a function of a Python file (`python`, input ``code``), a sequence classifier
    (`reward_model`, input ``model``), the URM reward model by its gated score or its helpfulness
    mean (`urm_gated`, `urm_helpfulness`, input ``model``), the comparison of the final answer with
    the prompt's reference answer (`math_verify`), your own server (`http`), a chat model at an
    address (`judge`), or a weighted sum of several (`weighted`).
    Only the settings of the oracles in use are read."""
    max_null_share: float = Field(0.0, ge=0, le=1)
    """Share of responses that may go without a score before the stage fails."""
    allow_control_tokens: bool = False
    """Score responses that spell control tokens of a reward model, too.
    `generate.allow_control_tokens` does so as well."""
    python: PythonSettings = PythonSettings()
    """Settings of the oracle `python`."""
    reward_model: ClassifierSettings = ClassifierSettings()
    """Settings of the oracles `reward_model`, `urm_gated` and `urm_helpfulness`."""
    http: HttpSettings = HttpSettings()
    """Settings of the oracle `http`."""
    judge: JudgeSettings = JudgeSettings()
    """Settings of the oracle `judge`."""
    weighted: WeightedSettings = WeightedSettings()
    """Settings of the oracle `weighted`."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the oracles that score: several if a weighted sum is the oracle."""
        return tuple(self.weighted.weights) if self.oracle == "weighted" else (self.oracle,)

    @property
    def needs(self) -> Mapping[str, str]:
        """Inputs that the oracles cannot do without, and the oracle that needs each."""
        return {name: part for part in self.parts for name in ORACLES[part].needs}

    def reads(self, name: str) -> bool:
        """True if an oracle has a use for an input of this name."""
        if name in self.needs:
            return True
        return any(name in ORACLES[part].takes for part in self.parts)

    def unused_fields(self) -> frozenset[str]:
        """The sections of the other oracles."""
        used = {ORACLES[name].section for name in (self.oracle, *self.parts)}
        return frozenset(entry.section for entry in ORACLES.values() if entry.section) - used

    @property
    def needs_references(self) -> bool:
        """True if a prompt without a reference answer gets no scores."""
        against_reference = "judge" in self.parts and self.judge.against == "reference"
        return against_reference or "math_verify" in self.parts

    @property
    def compares(self) -> bool:
        """True if scores only rank responses against each other."""
        judge = self.judge
        pairwise = judge.mode == "pairwise" and judge.against == "samples"
        return "judge" in self.parts and pairwise

    @model_validator(mode="after")
    def _check_parts(self) -> ScoreParams:
        if "http" in self.parts and not (self.http.url and self.http.identity):
            raise ValueError(
                "the oracle http needs http.url and http.identity: the address to post to, and the "
                "name and version that the server gives as its own"
            )
        if "judge" in self.parts and not (self.judge.url and self.judge.model):
            raise ValueError(
                "the oracle judge needs judge.url and judge.model: the address of the chat "
                "completions (…/v1/chat/completions), and the model's name at the server "
                "(docs/oracles.md#serve-a-judge)"
            )
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
        return self
