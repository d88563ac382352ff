"""Faults of a place for stages, as `geb doctor --runner` tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.pipeline.config import RunConfig
from flows.runners.choose import reap_for
from flows.runners.health import faults_of
from stages.contract.errors import UserError
from stages.contract.health import Health, look
from stages.contract.local_store import LocalStore


@pytest.fixture
def here(tmp_path: Path) -> Health:
    LocalStore.open(str(tmp_path), create=True)
    return look(str(tmp_path)).model_copy(update={"gpus": 1})


def faults(health: Health, *, ahead_seconds: float = 0, gpus: int = 1) -> list[str]:
    return list(faults_of(health, ahead_seconds=ahead_seconds, gpus=gpus, other_code="build it"))


def test_this_machine_is_a_place_without_faults(here: Health) -> None:
    assert faults(here, ahead_seconds=-1) == []


def test_every_fault_is_told(here: Health) -> None:
    far = here.model_copy(update={"store_error": "no such folder", "code": "other"})
    store, code, clock, gpus = faults(far, ahead_seconds=-9, gpus=2)
    assert "no such folder" in store
    assert "build it" in code
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
