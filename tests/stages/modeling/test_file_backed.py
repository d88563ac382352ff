"""Tensors in files: no name stays, and no memory of the process's own is taken."""

from __future__ import annotations

import multiprocessing
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from stages.contract.errors import UserError
from stages.modeling.file_backed import in_files


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def test_tensors_hold_what_is_written_and_leave_no_file(tmp_path):
    place = in_files(tmp_path)
    expected = {
        "float32": torch.randn(3, 5),
        "bfloat16": torch.randn(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(4),
        "empty": torch.empty(0, 4),
    }
    found = {name: place(each.shape, each.dtype).copy_(each) for name, each in expected.items()}
    for name, each in expected.items():
        assert found[name].shape == each.shape
        assert torch.equal(found[name], each)
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_no_memory_of_the_process(tmp_path):
    before = anonymous_mib()
    # 64 MiB, all of them written to.
    whole = in_files(tmp_path)((16, 1 << 20), torch.float32).fill_(1.0)
    assert anonymous_mib() - before < 32
    assert whole[3, 5] == 1.0


@pytest.mark.slow
def test_a_disk_without_room_is_a_message_and_no_signal(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False).returncode:
        pytest.fail("this test mounts a small tmpfs and needs root for it")
    try:
        # Of another process: written to without room, a mapped file ends its process.
        with (
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other,
            pytest.raises(UserError, match=f"no space left .* {disk}"),
        ):
            other.submit(_fill, disk).result()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fill(disk: Path) -> None:
    in_files(disk)((1 << 20,), torch.float32).fill_(1.0)
