"""Files of a manifest: those at a path, and their digests."""

from __future__ import annotations

import pytest

from stages.contract.digests import sha256_tree
from stages.contract.errors import DamagedArtifactError
from stages.contract.manifest import FileRecord, Manifest, read_manifest, software_versions

NAMES = ("checkpoint/config.json", "checkpoint/model.safetensors", "checkpoint2/x", "metrics.json")


def record(name: str, *, telemetry: bool = False) -> FileRecord:
    return FileRecord(size=1, sha256=f"digest of {name}", mtime_ns=0, telemetry=telemetry)


@pytest.fixture
def manifest() -> Manifest:
    files = {name: record(name) for name in NAMES}
    files["timings.json"] = record("timings.json", telemetry=True)
    # Only what the methods read; the rest is of no matter here.
    return Manifest.model_construct(stage="train", key="0123456789abcdef", files=files)


def test_files_at_a_path(manifest: Manifest) -> None:
    assert list(manifest.files_at()) == [*NAMES, "timings.json"]
    assert list(manifest.files_at("checkpoint")) == list(NAMES[:2])
    assert list(manifest.files_at("metrics.json")) == ["metrics.json"]
    assert list(manifest.files_at("metrics")) == []


def test_a_digest_is_of_one_file_of_a_folder_or_of_all_but_telemetry(manifest: Manifest) -> None:
    digests = {name: f"digest of {name}" for name in NAMES}
    assert manifest.digest("metrics.json") == digests["metrics.json"]
    assert manifest.digest("timings.json") == "digest of timings.json"
    assert manifest.digest() == sha256_tree(digests)
    assert manifest.digest("checkpoint") == sha256_tree(
        {"config.json": digests[NAMES[0]], "model.safetensors": digests[NAMES[1]]}
    )
    with pytest.raises(KeyError, match=r"artifact train/0123456789ab has no 'model'"):
        manifest.digest("model")


def test_a_manifest_that_cannot_be_read_names_the_artifact(tmp_path) -> None:
    folder = tmp_path / "train" / "0123456789abcdef"
    folder.mkdir(parents=True)
    with pytest.raises(DamagedArtifactError) as caught:
        read_manifest(folder)
    message = "damaged artifact train/0123456789ab: its manifest.json is missing or unreadable"
    assert str(caught.value).startswith(message)


def test_versions_are_of_python_of_the_machine_and_of_what_a_stage_uses() -> None:
    assert {"python", "platform", "pyarrow"} <= software_versions().keys()


def test_the_image_that_a_stage_runs_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEB_IMAGE", raising=False)
    assert "image" not in software_versions()
    monkeypatch.setenv("GEB_IMAGE", "geb-core:1@sha256:ab")
    assert software_versions()["image"] == "geb-core:1@sha256:ab"
