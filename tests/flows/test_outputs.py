"""Files that reports write."""

import pytest

from flows.report.files import write_file
from tests.damage import no_room


def test_a_disk_without_room_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "new/file"
    write_file(path, "before")
    longer = "after" * 100
    with pytest.raises(OSError), no_room():
        write_file(path, longer)
    assert path.read_text() == "before"
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_and_its_target_is_written(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    write_file(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "text"
