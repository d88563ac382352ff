"""Files that make up a digest, and places that have none."""

import os

import pytest

from stages.contract.digests import digest_of, files_of, state_of
from stages.contract.errors import UserError


def write(place, *names):
    for name in names:
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)


def test_hidden_files_and_folders_do_not_count_at_any_depth(tmp_path):
    seen = ("config.json", "parts/deep/model.safetensors", "parts/v1.0/tokenizer.json")
    hidden = (
        ".gitattributes",
        "parts/.DS_Store",
        # As a download from a model hub leaves it, with times that differ between machines.
        ".cache/huggingface/download/config.json.metadata",
        "parts/.git/objects/ab/cdef",
    )
    write(tmp_path, *seen, *hidden)
    assert [path.relative_to(tmp_path).as_posix() for path in files_of(tmp_path)] == list(seen)


def test_a_pipe_and_an_empty_folder_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is neither a file nor a folder"):
        digest_of(tmp_path / "pipe")
    with pytest.raises(UserError, match="is an empty folder"):
        digest_of(tmp_path)


def test_a_link_to_no_file_is_refused_unless_it_is_hidden(tmp_path):
    write(tmp_path, "config.json")
    (tmp_path / ".#config.json").symlink_to("an editor's lock")
    assert digest_of(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("../blobs/nothing")
    with pytest.raises(UserError, match=r"model\.safetensors is a link to no file"):
        digest_of(tmp_path)


def test_a_state_lasts_until_somebody_writes(tmp_path):
    write(tmp_path / "model", "config.json", "parts/model.safetensors", ".cache/times")
    weights = tmp_path / "model/parts/model.safetensors"
    for place in (tmp_path / "model", weights):
        before = state_of(place)
        write(tmp_path / "model", ".cache/times")
        assert state_of(place) == before
        os.utime(weights, (1, 1))
        assert state_of(place) != before
        os.utime(weights)
