"""The flow `bandit`: the bandit experiment, its table and figures as Prefect artifacts."""

from prefect.artifacts import create_image_artifact, create_markdown_artifact
from pydantic import Field

from flows.execution.cancellation import stage_flow
from flows.execution.prefect_progress import survives_outage
from flows.execution.prefect_tasks import step_tasks
from flows.execution.step_executor import StepExecutor
from flows.pipeline.placement import Execution
from flows.pipeline.step import Step
from flows.report.prefect_artifacts import image_address
from stages.bandit.params import BanditParams
from stages.contract.digests import derive_seed
from stages.contract.params import Settings
from stages.contract.request import Resources
from stages.store.base import Artifact


class BanditResources(Settings):
    """Resources of the bandit stage. They change speed and place only."""

    bandit: Resources = Field(Resources(), description="Resources of each call of `bandit`.")


class BanditConfig(Settings):
    """The bandit experiment: the methods compared, and where it runs."""

    name: str = Field("bandit", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the experiment in the store."""
    seed: int = Field(0, ge=0)
    """Seed from which every repetition's is derived."""
    store: str = "store"
    """The store: a folder, or a bucket as `s3://…`, `gs://…` or `az://…` (docs/store.md)."""
    bandit: BanditParams = BanditParams()
    """The experiment."""
    resources: BanditResources = BanditResources()
    """Resources of the stage."""
    execution: Execution = Execution()
    """Settings of the runner that starts the stage."""


@stage_flow("bandit", "{config.name}")
def bandit(config: BanditConfig) -> Artifact:
    """Compares f-DPO, GEB and the baselines on a bandit whose best arm is rarely played.

    An experiment that is in the store is shown as Cached and not run again.
    """
    with step_tasks(StepExecutor(config)) as tasks:
        tasks.submit(bandit_step(config))
        artifact = tasks.wait()["bandit"]
    table = artifact.file("table.md").read_text()
    survives_outage(create_markdown_artifact)(table, key="bandit-table")
    for figure in ("reference", "policies"):
        image = image_address(artifact.file(f"{figure}.png").read_bytes())
        survives_outage(create_image_artifact)(image, key=f"bandit-{figure}")
    return artifact


def bandit_step(config: BanditConfig) -> Step:
    """The one step of the experiment."""
    return Step("bandit", config.bandit, {}, derive_seed(config.seed, "bandit"))
