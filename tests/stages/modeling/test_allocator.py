"""Freed memory: given back to the system, unless a person has set otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PIECE_MIB, PIECES = 8, 20
PROGRAM = f"""
from stages.modeling.allocator import give_back_freed_memory

give_back_freed_memory()
# By itself glibc takes this piece's size for one to keep from now on.
whole = b"x" * ({2 * PIECE_MIB} << 20)
del whole
pieces = [b"x" * ({PIECE_MIB} << 20) for _ in range({PIECES})]
# The last one stays: there is something above all that is freed.
del pieces[::2]
with open("/proc/self/status") as lines:
    print(next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))
"""
KEPT = "33554432"


@pytest.mark.parametrize(
    ("set_by_a_person", "gives_back"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": KEPT}, False),
        ({"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={KEPT}"}, False),
    ],
)
def test_freed_pieces_go_back_unless_a_person_set_otherwise(set_by_a_person, gives_back):
    own = ("GLIBC_TUNABLES", "MALLOC_")
    calm = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(
        command, env=calm | set_by_a_person, capture_output=True, text=True, check=True
    ).stdout
    in_use, allocated = PIECES // 2 * PIECE_MIB, PIECES * PIECE_MIB
    resident_mib = int(said) / 1024
    assert (resident_mib < (in_use + allocated) / 2) == gives_back
    assert resident_mib > in_use
