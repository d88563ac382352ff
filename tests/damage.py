"""Damage of a file as a disk does it, and a disk that has no room."""

import resource
from contextlib import contextmanager


def truncate(path):
    """Takes the last byte away."""
    path.write_bytes(path.read_bytes()[:-1])


def alter(path):
    """Turns a bit in the middle: the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


_ROOM_BYTES = 20


@contextmanager
def no_room():
    """Within the block no file of this process gets longer than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
