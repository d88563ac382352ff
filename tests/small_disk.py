"""A disk that has no room: the kernel refuses to let a file grow, as a full disk would."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

_ROOM_BYTES = 20


@contextmanager
def no_room() -> Iterator[None]:
    """Within the block no file of this process gets longer than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
