"""Parameters of the prepare stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.contract.params import ImageName, InputSpec, OutputSpec, StageParams


class PrepareParams(StageParams):
    """Choice of the prompts, and their division among iterations and the test set."""

    stage: ClassVar[str] = "prepare"
    version: ClassVar[str] = "8"
    inputs = {
        "train": InputSpec(optional=True, many=True),
        "test": InputSpec(optional=True),
    }
    outputs = {
        "test.parquet": OutputSpec("prompts"),
        "iteration-*.parquet": OutputSpec("prompts", optional=True),
        "metrics.json": OutputSpec("file"),
    }

    iterations: int = Field(3, ge=0)
    """Number T of training parts D_1…D_T; 0 if there is a `test` source alone."""

    test_prompts: int = Field(256, ge=1)
    """Prompts held out of the training sources. Where the request names a `test` source, that
    source is the test set, and this number is not used."""

    prompts_per_iteration: int | None = Field(None, ge=1)
    """Most prompts in each part, chosen by the seed; null takes all. If there are enough prompts, a
    run that is continued with more `iterations` keeps the parts of its first ones."""

    overlap: Literal["drop_from_train", "drop_from_test"] = "drop_from_train"
    """Side that loses a prompt of both training and a `test` source: training, so that the test set
    is whole, or the test set, as in the paper."""

    messages_column: str = "messages"
    """Column of chat messages (`context_messages` in the paper's data sets)."""

    prompt_column: str = "prompt"
    """Column of plain text, read as one user message; used in rows without chat messages."""

    reference_column: str = "reference_answer"
    """Column of reference answers for oracles that compare; rows may lack it. A dot leads into a
    column of structs (`reward_model.ground_truth`)."""

    reference_columns: tuple[str, ...] = ()
    """Columns that make up the reference answer together, as a JSON object of their names and
    values, in the place of `reference_column` (`instruction_id_list` and `kwargs` of IFEval)."""

    reference_item: int | None = Field(None, ge=0)
    """Item of a reference column that holds a list (0 of OlympiadBench's `final_answer`)."""

    system_prompt: str | None = None
    """System message put before every prompt that has none."""

    invalid_rows: Literal["refuse", "drop"] = "refuse"
    """Rows that hold no usable prompt, and rows of `inputs.preferences` that hold no preference:
    end with a message that names the first, or drop and count them."""

    subset: str | None = None
    """Configuration name of a hub data set that has several (`main` of `openai/gsm8k`). Prompts of
    `inputs.preferences` have `preferences.subset` if that is set."""

    hub_file: str | None = None
    """File of the hub repository that is read (``.jsonl``, ``.json``, ``.parquet``), if the data
    set cannot be loaded by name or holds other files too; `subset` and splits are then not read."""

    split: str = "train"
    """Split that is read from hub data sets given as `train`. Prompts of `inputs.preferences` have
    `preferences.split`."""

    test_split: str = "train"
    """Split that is read from a hub data set given as `test`."""

    def image_for(self, *, from_hub: bool) -> ImageName:
        """A data set of the hub is read by a library that torch's image has."""
        return "torch" if from_hub else self.image

    @model_validator(mode="after")
    def _check_reference(self) -> PrepareParams:
        if self.reference_columns and self.reference_item is not None:
            raise ValueError(
                "reference_item is of `reference_column`, and reference_columns is set: leave one "
                "of them out"
            )
        return self
