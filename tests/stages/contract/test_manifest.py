"""Files of a manifest: those at a path, and their digests."""

import json
import math

import pytest
from pydantic import ValidationError

from stages.contract.digests import sha256_tree
from stages.contract.manifest import FileRecord, Manifest, make_manifest, software_versions
from stages.contract.request import FileInput, HubInput, make_request
from stages.prepare.params import PrepareParams

NAMES = ("checkpoint/config.json", "checkpoint/model.safetensors", "checkpoint2/x", "metrics.json")


def record(name, *, telemetry=False):
    return FileRecord(size=1, sha256=f"digest of {name}", mtime_ns=0, telemetry=telemetry)


@pytest.fixture
def manifest():
    files = {name: record(name) for name in NAMES}
    files["timings.json"] = record("timings.json", telemetry=True)
    # Only what the methods read; the rest is of no matter here.
    return Manifest.model_construct(stage="train", key="0123456789abcdef", files=files)


def test_files_at_a_path(manifest):
    assert list(manifest.files_at()) == [*NAMES, "timings.json"]
    assert list(manifest.files_at("checkpoint")) == list(NAMES[:2])
    assert list(manifest.files_at("metrics.json")) == ["metrics.json"]
    assert list(manifest.files_at("metrics")) == []


def test_a_digest_is_of_one_file_of_a_folder_or_of_all_but_telemetry(manifest):
    digests = {name: f"digest of {name}" for name in NAMES}
    assert manifest.digest("metrics.json") == digests["metrics.json"]
    assert manifest.digest("timings.json") == "digest of timings.json"
    assert manifest.digest() == sha256_tree(digests)
    assert manifest.digest("checkpoint") == sha256_tree(
        {"config.json": digests[NAMES[0]], "model.safetensors": digests[NAMES[1]]}
    )
    with pytest.raises(KeyError, match=r"artifact train/0123456789ab has no 'model'"):
        manifest.digest("model")


@pytest.fixture
def whole():
    return Manifest(
        stage="pair",
        version="1",
        key="0" * 64,
        params={"margin": math.nan, "order": ("a", "b")},
        seed=1 << 62,
        inputs={"scores": (FileInput(location="é\u2028", digest="1" * 64),)},
        run="run",
        step="iteration-1/pair",
        files={"pairs.parquet": FileRecord(size=10, sha256="2" * 64, mtime_ns=3)},
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:00:01+00:00",
        software={"python": "3.11"},
        host="host",
        accelerator="cpu",
    )


def test_a_flipped_bit_is_noticed_wherever_it_is(whole):
    """A digest with another digit would go into the keys of what is made of the artifact."""
    text = whole.model_dump_json(indent=2).encode()
    kept = Manifest.model_validate_json(text)
    for place in range(len(text)):
        for bit in range(8):
            data = bytearray(text)
            data[place] ^= 1 << bit
            try:
                assert Manifest.model_validate_json(bytes(data)) == kept, bytes(data)
            except ValidationError:
                continue


def test_inputs_are_kept_with_their_digests():
    """A lineage names them; a repository of the hub has its digest from its other fields alone."""
    inputs = {
        "train": [HubInput(repo="owner/data", revision="abc", repo_type="dataset")],
        "test": [FileInput(location="/here/test.jsonl", digest="d1")],
    }
    request = make_request(PrepareParams(), inputs=inputs, seed=0, store="store")
    manifest = make_manifest(
        request, files={}, started="2026-01-01T00:00:00+00:00", ended="2026-01-01T00:00:01+00:00"
    )
    kept = Manifest.model_validate_json(manifest.model_dump_json())
    assert kept.inputs == request.inputs
    assert [source.digest for source in kept.sources()] == ["hub:dataset:owner/data@abc", "d1"]


def test_an_earlier_manifest_with_a_hub_input_can_be_read(whole):
    source = HubInput(repo="owner/data", revision="abc", repo_type="dataset")
    content = json.loads(
        whole.model_copy(update={"inputs": {"train": (source,)}}).model_dump_json()
    )
    content["inputs"]["train"][0]["digest"] = source.digest
    del content["seal"]
    assert Manifest.model_validate(content).inputs == {"train": (source,)}


def test_the_image_that_a_stage_runs_in_is_named(monkeypatch):
    monkeypatch.delenv("GEB_IMAGE", raising=False)
    assert "image" not in software_versions()
    monkeypatch.setenv("GEB_IMAGE", "geb-core:1@sha256:ab")
    assert software_versions()["image"] == "geb-core:1@sha256:ab"
