"""Health of a place for stages, told from there: ``python -m stages.harness.health STORE``.

An orchestrator runs it where it would run a stage, and reads the JSON object that it tells.
"""

import os
import sys
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from stages.contract.errors import GebError
from stages.contract.events import Log
from stages.contract.manifest import stages_digest
from stages.store.opening import open_store


class Health(BaseModel):
    """Findings of the program."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    code: str
    """Digest of the stages' code there."""
    time: float
    """Its clock, in seconds since the epoch."""
    user: int
    """Id of its user."""
    gpus: int
    """NVIDIA GPUs that it sees."""
    store_error: str
    """Reason why it cannot read the store; empty if it can."""


def look(store: str) -> Health:
    """Looks at this place, and for a store."""
    error = ""
    try:
        open_store(store)
    except (GebError, OSError) as caught:
        error = str(caught)
    return Health(
        code=stages_digest(),
        time=time.time(),
        user=os.geteuid(),
        gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        store_error=error,
    )


if __name__ == "__main__":
    sys.stdout.write(Log(message=look(sys.argv[1]).model_dump_json()).model_dump_json() + "\n")
