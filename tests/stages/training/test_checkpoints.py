"""Checkpoints of a training: a damaged one is set aside, the one before it is used."""

from pathlib import Path

import pytest

from stages.training.checkpoints import Checkpoint, make_room, newest_whole, publish_checkpoint
from tests.damage import alter, truncate


def publish(folder, step):
    make_room(folder, step)
    written = folder.parent / ".writing" / f"checkpoint-{step}"
    (written / "global_step").mkdir(parents=True)
    for name in ("model.safetensors", "global_step/optimizer.pt", "metrics.jsonl"):
        (written / name).write_bytes(f"{name} {step} ".encode() * 50)
    return publish_checkpoint(written, {"kappa": step}, folder)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_and_the_one_before_it_are_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (5, 9, 10, 100):
        publish(folder, step)
    assert names(folder) == ["checkpoint-10", "checkpoint-100"]
    path = folder / "checkpoint-100"
    assert newest_whole(folder, pytest.fail) == Checkpoint(100, path, {"kappa": 100})


@pytest.mark.parametrize("damage", [truncate, alter, Path.unlink])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "global_step/optimizer.pt",
        "metrics.jsonl",
        "geb_state.json",
    ],
)
def test_a_damaged_one_is_set_aside_and_named(tmp_path, name, damage):
    folder = tmp_path / "checkpoints"
    publish(folder, 1)
    damage(publish(folder, 2) / name)
    warnings = []
    assert newest_whole(folder, warnings.append).step == 1
    [warning] = warnings
    assert str(folder / "checkpoint-2") in warning
    assert name in warning or damage is alter
    kept, aside = names(folder)
    assert kept == "checkpoint-1"
    assert aside.startswith("damaged-")
    assert aside in warning
    # The next look finds it as it is.
    assert newest_whole(folder, pytest.fail).step == 1


def test_a_training_that_starts_anew_replaces_later_checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    publish(folder, 10)
    publish(folder, 20)
    publish(folder, 10)
    assert names(folder) == ["checkpoint-10"]
