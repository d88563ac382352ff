"""Names that configurations may use, against the tables of what there is."""

import re
import typing

import pytest

from experiments.bandit import DIVERGENCE_LABELS, LABELS
from stages.contract.number_types import NumberType
from stages.contract.params import ImageName, Settings
from stages.generate.params import BACKENDS, GenerateParams
from stages.modeling.load import DTYPES
from stages.objectives.designs import DESIGNS
from stages.objectives.divergences import DIVERGENCES
from stages.pair.params import Strategy
from stages.pair.select import STRATEGIES
from stages.score.params import ORACLES, ScoreParams
from stages.tables.schemas import SCHEMAS
from stages.train.params import TrainParams
from tests.flows.loop import ROOT
from tests.stages.contract.test_key import STAGES

# Targets of the images' Dockerfile that are images; those for GPUs have their name with `-gpu`.
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
TARGETS = set(re.findall(r"^FROM (?:core|shared) AS (\w+)$", DOCKERFILE, re.MULTILINE))
KINDS = {output.kind for params in STAGES for output in params.outputs.values()}


def names(annotation):
    """Strings of the Literals in a type."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return {argument for argument in arguments if isinstance(argument, str)}
    return set().union(*map(names, arguments))


def field(model, name):
    return names(model.model_fields[name].annotation)


@pytest.mark.parametrize(
    ("named", "known"),
    [
        (names(ImageName), TARGETS - {"flows"}),
        (KINDS - {"model", "file", "metrics"}, SCHEMAS),
        (names(NumberType), {"auto", *DTYPES}),
        (names(Strategy), STRATEGIES),
        (field(GenerateParams, "backend"), BACKENDS),
        (field(TrainParams, "divergence"), DIVERGENCES),
        (field(TrainParams, "design"), DESIGNS),
        (set(LABELS), DESIGNS),
    ],
)
def test_every_name_is_in_its_table_and_the_other_way_round(named, known):
    assert named == set(known)


def test_every_divergence_with_a_label_is_in_its_table():
    assert set(DIVERGENCE_LABELS) <= set(DIVERGENCES)


def test_parameters_registry_and_page_name_the_same_oracles():
    named = list(ScoreParams.model_fields["oracle"].annotation.__args__)
    assert list(ORACLES) == named
    sections = {
        name
        for name, section in ScoreParams.model_fields.items()
        if isinstance(section.annotation, type) and issubclass(section.annotation, Settings)
    }
    assert {oracle.section for oracle in ORACLES.values()} - {""} == sections
    table = (ROOT / "docs/oracles.md").read_text().partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", table, re.MULTILINE) == named
