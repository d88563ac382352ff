"""Faults of a place for stages, as `geb doctor --runner` tells them."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.pipeline.config import RunConfig
from flows.runners.choose import reap_for
from flows.runners.health import faults_of
from stages.contract.errors import UserError
from stages.contract.events import Log, parse_event
from stages.harness.health import Health
from stages.store.base import Store


def told(store: Path) -> Health:
    """Answer of the health program, started as a runner starts it."""
    command = [sys.executable, "-m", "stages.harness.health", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    event = parse_event(done.stdout)
    assert isinstance(event, Log)
    return Health.model_validate_json(event.message)


@pytest.fixture
def here(tmp_path: Path) -> Health:
    Store.open(str(tmp_path), create=True)
    return told(tmp_path).model_copy(update={"gpus": 1})


def faults(health: Health, *, ahead_seconds: float = 0, gpus: int = 1) -> list[str]:
    return list(faults_of(health, ahead_seconds=ahead_seconds, gpus=gpus))


def test_this_machine_is_a_place_without_faults(here: Health) -> None:
    assert faults(here, ahead_seconds=-1) == []


def test_every_fault_is_told(here: Health, tmp_path: Path) -> None:
    far = told(tmp_path / "elsewhere").model_copy(update={"gpus": 1, "code": "other"})
    store, code, clock, gpus = faults(far, ahead_seconds=-9, gpus=2)
    assert str(tmp_path / "elsewhere") in store
    assert "build and push" in code
    assert "-9 s off" in clock
    assert "1 GPUs of 2" in gpus


def test_without_an_engine_only_a_wish_for_containers_is_refused(
    here: Health, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'nowhere'}")
    config = RunConfig(store=str(tmp_path))
    [line] = reap_for(None, config)
    assert "no Docker engine answers" in line
    with pytest.raises(UserError, match="no Docker engine answers"):
        reap_for("docker", config)
