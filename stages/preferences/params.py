"""Parameters of the preferences stage."""

from typing import ClassVar, Literal

from stages.contract.params import ChatSettings, InputSpec, OutputSpec, StageParams


class PreferencesParams(StageParams, ChatSettings):
    """Pairs from a data set of preferences, for the prompts of an iteration.

    It reads TRL's columns `prompt`, `chosen` and `rejected`, texts or messages. Without `prompt`,
    the prompt is the beginning of both conversations.
    """

    stage: ClassVar[str] = "preferences"
    version: ClassVar[str] = "5"
    inputs = {
        "data": InputSpec(),
        "prompts": InputSpec(),
        "policy": InputSpec(),
    }
    outputs = {
        "pairs.parquet": OutputSpec("pairs"),
        "metrics.json": OutputSpec("file"),
    }
    image = "torch"

    subset: str | None = None
    """Configuration name of a hub data set that has several; without `inputs.prompts`, `prepare`
    reads it as well."""
    split: str = "train"
    """Split that is read from a hub data set (`train_prefs` of `ultrafeedback_binarized`); without
    `inputs.prompts`, `prepare` reads it as well."""
    prompt_system: str | None = None
    """System message of prompts that have none, as `prepare.system_prompt`; set by the run."""
    invalid_rows: Literal["refuse", "drop"] = "refuse"
    """Rows that hold no preference, as `prepare.invalid_rows`; set by the run."""
