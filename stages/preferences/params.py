"""Parameters of the preferences stage."""

from typing import ClassVar

from stages.contract.params import ChatSettings, InputSpec, OutputSpec, StageParams


class PreferencesParams(StageParams, ChatSettings):
    """Pairs from a data set of preferences, for the prompts of an iteration.

    Read are the formats of TRL, conversational or not, with the prompt in a column of its own or as
    the beginning of both conversations.
    """

    stage: ClassVar[str] = "preferences"
    version: ClassVar[str] = "2"
    inputs = {
        "data": InputSpec("file"),
        "prompts": InputSpec("prompts"),
        "policy": InputSpec("model"),
    }
    outputs = {
        "pairs.parquet": OutputSpec("pairs"),
        "metrics.json": OutputSpec("file"),
    }
    image = "torch"

    prompt_column: str = "prompt"
    """Column of the prompt: text or messages. Conversations that open with the prompt need none."""
    chosen_column: str = "chosen"
    """Column of the preferred response: text or messages."""
    rejected_column: str = "rejected"
    """Column of the other response."""
    subset: str | None = None
    """Configuration name of a hub data set that has several."""
    split: str = "train"
    """Split that is read from a hub data set (`train_prefs` of `ultrafeedback_binarized`)."""
    prompt_system: str | None = None
    """System message of prompts that have none, as `prepare.system_prompt`; set by the run."""
