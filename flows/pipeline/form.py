"""The form that the Prefect UI shows for a configuration: the fields in common use.

Every field starts empty, and an empty field is not sent. What a person fills in is laid over the
preset, and nothing else. All other fields of the configuration are lines under `settings`, or
parameters given as JSON.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from flows.pipeline.placement import runner_names
from stages.score.params import ORACLES
from stages.train.params import TrainParams

SETTINGS = "settings"
"""Entry with lines that set fields which the form does not show."""
LONG_NAMES: Mapping[str, str] = {
    "kappa": "train.kappa",
    "design": "train.design",
    "divergence": "train.divergence",
    "learning_rate": "train.learning_rate",
    "num_samples": "generate.num_samples",
    "prompts": "inputs.prompts",
    "policy": "inputs.policy",
    "oracle_code": "inputs.oracle_code",
    "oracle": "score.oracle",
    "runner": "execution.runner",
    "parallel": "execution.parallel",
}
"""Names in the configuration of fields that have another name there."""


def one_of(values: Iterable[str]) -> WithJsonSchema:
    """Annotates a ``str`` with the values that the form offers."""
    return WithJsonSchema({"type": "string", "enum": list(values)})


_OF_A_RUN = ("name", "seed")


def _show_empty(schema: dict[str, Any]) -> None:
    """No field is needed. The UI sorts them by position and shows them by title."""
    del schema["required"]
    fields = schema["properties"]
    # Name and seed, which differ from run to run, come first.
    for position, name in enumerate(sorted(fields, key=lambda name: name not in _OF_A_RUN)):
        fields[name] |= {"title": name, "position": position}


class SharedForm(BaseModel):
    """Differences from the preset that all runs share."""

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_extra=_show_empty)

    iterations: int = Field(ge=1)
    """Number of iterations."""
    kappa: float = Field(ge=0)
    """Weight κ of the exploratory bonus."""
    design: Annotated[str, one_of(get_args(TrainParams.model_fields["design"].annotation))]
    """The exploratory bonus; none is plain f-DPO."""
    divergence: str
    """reverse_kl, hellinger, forward_kl, js, or α of an α-divergence from 0 to 1."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate of the training."""
    num_samples: int = Field(ge=1)
    """Responses sampled for each prompt."""
    prompts: str
    """Prompts to train on: a file, a folder, or a data set of the hub."""
    policy: str
    """Model to start from: a folder or a hub id."""
    oracle_code: str
    """File of the oracle's function or template."""
    oracle: Annotated[str, one_of(ORACLES)]
    """Oracle that scores the responses."""
    runner: Annotated[str, one_of(runner_names())]
    """Place of the stages: the worker's machine, or a cluster."""
    parallel: int = Field(ge=1)
    """Stages that may run at the same time."""
    store: str
    """The store: a folder, or s3://, gs:// or az://."""
    settings: list[str]
    """Any other fields, an item each: train.beta=0.05, resources.train.gpus=1. The documentation
    and the command geb fields list them."""


class RunForm(SharedForm):
    """Differences from the preset. An empty field takes the preset's value."""

    name: str
    """Name of the run."""
    seed: int = Field(ge=0)
    """Seed of everything random."""


RunOverrides = Annotated[dict[str, Any], WithJsonSchema(RunForm.model_json_schema())]
"""Overrides of one run, by the fields of its form or of a configuration."""
SharedOverrides = Annotated[dict[str, Any], WithJsonSchema(SharedForm.model_json_schema())]
"""Overrides of all runs of a sweep."""
