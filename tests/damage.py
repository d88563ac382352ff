"""Damage of a file, as a disk does it."""

from pathlib import Path


def truncate(path: Path) -> None:
    """Takes the last byte away."""
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    """Turns a bit in the middle: the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
