"""Files that appear whole, or not at all."""

import errno
import os

import pytest

from stages.contract.atomic import atomic_path, write_atomically
from stages.contract.errors import UserError


def test_a_file_is_the_old_one_until_it_is_whole(tmp_path):
    path = tmp_path / "folder" / "file.json"
    write_atomically(path, "old")
    with atomic_path(path) as scratch:
        scratch.write_text("half")
        assert path.read_text() == "old"
        scratch.write_text("whole")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, b"old")
    with pytest.raises(KeyError), atomic_path(path) as scratch:
        scratch.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "no space left on the device that holds"), (errno.EROFS, "cannot be written")],
)
def test_a_disk_that_takes_nothing_is_named(tmp_path, monkeypatch, number, said):
    path = tmp_path / "file.json"
    write_atomically(path, "old")

    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match=said) as caught:
        write_atomically(path, "new", durable=True)
    assert str(tmp_path) in caught.value.message and caught.value.remedy
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


@pytest.mark.parametrize("denied", ["", "new", "new/.file.json.1a2b3c4d"])
def test_a_folder_that_cannot_be_made_or_written_is_named(tmp_path, monkeypatch, denied):
    def refuse(*_, **__):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / denied))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UserError, match=f"^{tmp_path / 'new'} cannot be written") as caught:
        write_atomically(tmp_path / "new/file.json", "text")
    assert "another folder" in caught.value.remedy
