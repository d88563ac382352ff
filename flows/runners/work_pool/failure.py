"""Failure of a stage on a worker, handed to the orchestrator that waits for it.

Prefect keeps only the message of a failure. The rest is in an artifact of the flow run: a table
that a person can read as well.
"""

from __future__ import annotations

import json
from typing import Literal
from uuid import UUID

from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
)
from pydantic import BaseModel

from stages.contract.errors import PreemptedError, StageFailedError, UserError

# A table with this first column is a failure.
_FIELD = "failure"
_VALUE = "is"
# Keeps the artifact far below what makes the UI slow.
_MAX_CHARACTERS = 20_000


class StageFailure(BaseModel):
    """Reason why a stage's flow run failed.

    Attributes:
        kind: A person's mistake, which no retry cures, something that one may, or a machine that
            was taken away.
        message: What went wrong.
        remedy: What a person can do about it.
        last_lines: The end of the stage's log.
    """

    kind: Literal["user", "stage", "preempted"]
    message: str
    remedy: str = ""
    last_lines: str = ""

    @classmethod
    def of(cls, error: UserError | StageFailedError) -> StageFailure:
        """Describes an error that a runner raised."""
        if isinstance(error, UserError):
            return cls(kind="user", message=error.message, remedy=error.remedy)
        lines = "\n".join(error.last_lines)[-_MAX_CHARACTERS:]
        kind: Literal["stage", "preempted"] = (
            "preempted" if isinstance(error, PreemptedError) else "stage"
        )
        return cls(kind=kind, message=str(error), last_lines=lines)

    def error(self) -> UserError | StageFailedError:
        """The error that :meth:`of` described."""
        if self.kind == "user":
            return UserError(self.message, self.remedy)
        made = PreemptedError if self.kind == "preempted" else StageFailedError
        return made(self.message, tuple(self.last_lines.splitlines()))

    def publish(self, key: str) -> None:
        """Creates the artifact; to be called inside the flow run."""
        rows = [{_FIELD: name, _VALUE: value} for name, value in self.model_dump().items()]
        create_table_artifact(rows, key=key, description="Why this stage failed.")

    @classmethod
    def read(cls, client: SyncPrefectClient, flow_run_id: UUID) -> StageFailure | None:
        """The failure that a flow run left, or None."""
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]),
                type=ArtifactFilterType(any_=["table"]),
            )
        )
        for artifact in found:
            rows = json.loads(artifact.data) if isinstance(artifact.data, str) else []
            if rows and _FIELD in rows[0]:
                return cls.model_validate({each[_FIELD]: each[_VALUE] for each in rows})
        return None
