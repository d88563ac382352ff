"""Health of a place for stages, as it tells of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stages.contract.health import Health
from stages.contract.local_store import LocalStore
from stages.contract.provenance import stages_digest


def told(store: Path) -> Health:
    done = subprocess.run(
        [sys.executable, "-m", "stages.contract.health", str(store)],
        capture_output=True,
        text=True,
        check=True,
    )
    return Health.model_validate_json(done.stdout)


def test_a_store_that_is_there_is_read_and_another_is_named(tmp_path: Path) -> None:
    LocalStore.open(str(tmp_path / "store"), create=True)
    health = told(tmp_path / "store")
    assert health.store_error == ""
    assert health.code == stages_digest()
    assert str(tmp_path / "elsewhere") in told(tmp_path / "elsewhere").store_error
