"""Refusals: full disks, places without a store, wrong requests, edited inputs."""

import errno
import io
import json
import os
import re
from typing import ClassVar

import pytest
import torch

from stages.contract.digests import digest_of, state_of
from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.contract.params import InputSpec, StageParams
from stages.harness import program
from stages.harness.program import Stage, execute
from stages.store.base import Store
from stages.store.locks import FileLease
from stages.tables.schemas import PROMPTS, write_table
from tests.stage_calls import file_input, request_for
from tests.stages.contract.writer_stage import WRITER, WriterParams, compute, request


def test_a_folder_without_a_store_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("dear")
    newer = Store.in_folder(str(tmp_path / "newer"), create=True)
    (newer.root / "store.json").write_text(json.dumps({"format": 99}))
    cases = [
        (str(tmp_path / "full"), "is not a store", "set `store` to"),
        (
            str(tmp_path / "full/file"),
            f"{tmp_path / 'full/file'} is not an empty folder",
            "set `store` to",
        ),
        (str(newer.root), "store of format 99", "another store"),
    ]
    for location, message, remedy in cases:
        with pytest.raises(UserError, match=message) as caught:
            Store.in_folder(location, create=True)
        assert remedy in (caught.value.remedy or "")


def fills_disk_with_bytes(ctx):
    # The kernel's own "no space left", without filling a disk.
    (ctx.out / "big").symlink_to("/dev/full")
    (ctx.out / "big").write_bytes(bytes(100))


def fills_disk_with_a_table(ctx):
    (ctx.out / "big.parquet").symlink_to("/dev/full")
    write_table(ctx.out / "big.parquet", PROMPTS, [])


def fills_disk_with_weights(ctx):
    # The message of safetensors, whose error is not an OSError.
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def fills_disk_with_a_training_state(ctx):
    (ctx.out / "state.pt").symlink_to("/dev/full")
    torch.save({"weight": torch.zeros(10_000)}, ctx.out / "state.pt")


@pytest.mark.parametrize(
    "run",
    [
        fills_disk_with_bytes,
        fills_disk_with_a_table,
        fills_disk_with_weights,
        fills_disk_with_a_training_state,
    ],
)
def test_a_full_disk_is_one_clear_message(store, run):
    with pytest.raises(UserError, match="no space left") as caught:
        compute(store, Stage(WriterParams, run))
    for part in (str(store.root), "HF_HOME"):
        assert part in caught.value.message
    assert "geb gc" in caught.value.remedy
    assert list(store.artifacts()) == []
    assert list((store.root / "artifacts/writer").iterdir()) == []


def test_a_cache_on_a_full_disk_is_not_called_the_store(store):
    def download(ctx):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/home/me/.cache/huggingface/x")

    full = r"^no space left on the device that holds /home/me/\.cache/huggingface/x\n"
    with pytest.raises(UserError, match=full):
        compute(store, Stage(WriterParams, download))


def test_a_lease_that_a_full_disk_holds_is_one_clear_message(store, monkeypatch):
    release = FileLease.release

    def fail(lease):
        release(lease)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileLease, "release", fail)
    with pytest.raises(UserError, match="no space left"):
        compute(store, Stage(WriterParams, fills_disk_with_bytes))


def test_a_file_elsewhere_that_is_denied_is_named(store):
    def read(ctx):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/models/reward")

    with pytest.raises(UserError, match=r"^/models/reward cannot be opened: Permission denied"):
        compute(store, Stage(WriterParams, read))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": "other"}, "the request is for other version 1"),
        ({"version": "0"}, "for writer version 0, this program is writer version 1"),
        ({"params": {"txt": "x"}}, "wrong parameters for writer"),
        ({"seed": 5}, "is not the key of its content"),
    ],
)
def test_a_request_that_is_not_this_stages_is_refused(store, change, message):
    wrong = request(store).model_copy(update=change)
    with pytest.raises(UserError, match=message):
        execute(WRITER, wrong, Emitter(io.StringIO()))
    assert list(store.artifacts()) == []


class ReaderParams(StageParams):
    """A stage that reads one external input."""

    stage: ClassVar[str] = "reader"
    version: ClassVar[str] = "1"
    inputs: ClassVar = {"code": InputSpec()}


@pytest.mark.parametrize("edited", ["oracle.py", "model/config.json"])
def test_an_input_edited_after_the_request_was_made_is_refused(store, tmp_path, edited):
    """Else what was made of the edited file would be the artifact of the one before, for good."""
    (tmp_path / "model").mkdir()
    (tmp_path / edited).write_text("one\n")
    place = tmp_path / edited.partition("/")[0]
    request_ = request_for(ReaderParams(), {"code": place}, store.root)
    (tmp_path / edited).write_text("two\n")
    stage = Stage(ReaderParams, lambda ctx: None)
    with pytest.raises(UserError, match=re.escape(f"'code': {place} has changed since")):
        execute(stage, request_, Emitter(io.StringIO()))
    (tmp_path / edited).write_text("one\n")
    execute(stage, request_, Emitter(io.StringIO()))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_large_input_is_hashed_where_its_size_or_time_has_changed(
    store, tmp_path, monkeypatch, is_known
):
    """An input without size and time in its request is not hashed again."""
    monkeypatch.setattr(program, "_HASHED_BYTES", 2)
    weights = tmp_path / "weights"
    weights.write_text("one\n")
    source = file_input(weights)
    if is_known:
        source = source.model_copy(update={"state": state_of(weights)})
    request_ = request_for(ReaderParams(), {"code": source}, store.root)
    hashed = []
    monkeypatch.setattr(program, "digest_of", lambda path: hashed.append(path) or digest_of(path))
    stage = Stage(ReaderParams, lambda ctx: None)
    weights.write_text("two\n")
    os.utime(weights, (1, 1))
    if is_known:
        with pytest.raises(UserError, match="has changed since"):
            execute(stage, request_, Emitter(io.StringIO()))
        weights.write_text("one\n")
        os.utime(weights, (2, 2))
    execute(stage, request_, Emitter(io.StringIO()))
    assert hashed == ([weights, weights] if is_known else [])
