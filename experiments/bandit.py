"""The flow `bandit`: the bandit experiment, its table and figures as Prefect artifacts."""

from __future__ import annotations

import base64
from typing import Any

from prefect import flow
from prefect.artifacts import create_image_artifact, create_markdown_artifact
from pydantic import Field

from flows.execution.cancellation import ends_cancelled
from flows.execution.hooks import remove_containers
from flows.execution.outage import survives_outage
from flows.execution.prefect_tasks import step_tasks
from flows.execution.step_executor import StepExecutor
from flows.pipeline.placement import Execution, resources_of
from flows.pipeline.step import Step
from stages.bandit.params import BanditParams
from stages.contract.digests import derive_seed
from stages.contract.params import Settings
from stages.contract.store import Artifact

# The paper's two figures; the curves beside them are too large for an artifact of Prefect.
_SHOWN_FIGURES = ("reference", "policies")


class Experiment(Settings):
    """The stage of the bandit experiment."""

    name: str = Field("bandit", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the experiment in the store."""
    seed: int = Field(0, ge=0)
    """Seed from which every repetition's is derived."""
    store: str = "store"
    """The store: a folder, or a bucket as `s3://…`, `gs://…` or `az://…` (docs/store.md)."""
    bandit: BanditParams = BanditParams()
    """The experiment."""


_ResourcesByStage: Any = resources_of(Experiment)


class BanditResources(_ResourcesByStage):
    """Resources of the bandit stage. They change speed and place only."""


class BanditConfig(Experiment):
    """The bandit experiment: the methods compared, and where it runs."""

    resources: BanditResources = BanditResources()
    """Resources of the stage."""
    execution: Execution = Execution()
    """Settings of the runner that starts the stage."""


@flow(
    name="bandit",
    flow_run_name="{config.name}",
    persist_result=False,
    on_cancellation=[remove_containers],
    on_crashed=[remove_containers],
)
@ends_cancelled
def bandit(config: BanditConfig) -> Artifact:
    """Compares f-DPO, GEB and the baselines on a bandit whose best arm is rarely played.

    An experiment that is in the store is shown as Cached and not run again.
    """
    with step_tasks(StepExecutor(config)) as tasks:
        tasks.submit(bandit_step(config))
        artifact = tasks.wait()["bandit"]
    _show(artifact)
    return artifact


def bandit_step(config: BanditConfig) -> Step:
    """The one step of the experiment."""
    return Step("bandit", config.bandit, {}, derive_seed(config.seed, "bandit"))


@survives_outage
def _show(artifact: Artifact) -> None:
    create_markdown_artifact(artifact.file("table.md").read_text(), key="bandit-table")
    for figure in _SHOWN_FIGURES:
        data = base64.b64encode(artifact.file(f"{figure}.png").read_bytes()).decode()
        create_image_artifact(f"data:image/png;base64,{data}", key=f"bandit-{figure}")
