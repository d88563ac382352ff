"""Lease on one key among all hosts that share a bucket.

An object that its holder renews by conditional writes, so that of two who want it one gets it. It
is never deleted, only emptied: every change is then a write on condition of the content before,
which all S3-compatible storages with conditional writes agree on. Age is told by the storage's
clock alone; a holder on this machine that died is noticed at once, by its pid.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from stages.contract.errors import GebError
from stages.contract.lease import EXPIRY_SECONDS, Lease
from stages.contract.remote.bucket import Bucket, Found, Version
from stages.contract.remote.errors import ConflictError

HEARTBEAT_SECONDS = 20.0
_FREE = b""
# Owners that are threads of this process.
_held_here: set[str] = set()


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; tells a pid from a later reuse of it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _machine() -> str:
    """Identity of this kernel and pid namespace: where a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


class _Record(BaseModel):
    """Content of a lease's object; ``since`` is in seconds since the epoch."""

    owner: str
    host: str
    machine: str
    pid: int
    process_start: str | None
    since: float

    @classmethod
    def of_this_process(cls, owner: str) -> _Record:
        """Record of the holder, this process, as of now."""
        return cls(
            owner=owner,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            process_start=_process_start(os.getpid()),
            since=time.time(),
        )

    def is_dead(self) -> bool:
        """True where its holder on this machine has ended, or is this process and let it go."""
        if self.machine != _machine():
            return False
        if _process_start(self.pid) != self.process_start:
            return True
        # One of this process that could not be given back, as the bucket was gone, is nobody's.
        return self.pid == os.getpid() and self.owner not in _held_here


class RemoteLease(Lease):
    """A lease on one object.

    Args:
        bucket: The store's bucket.
        name: The lease's object.
    """

    poll_seconds = 2.0

    def __init__(self, bucket: Bucket, name: str) -> None:
        super().__init__(name)
        self._bucket = bucket
        self._version: Version | None = None

    def holder(self) -> dict[str, Any] | None:
        """Holder of the lease now (``host``, ``pid``, ``since``), or None."""
        found = self._bucket.get(self._name)
        return None if found is None else self._living_holder(found)

    def _try_acquire(self) -> dict[str, Any] | None:
        while True:
            found = self._bucket.get(self._name)
            if found is not None and (holder := self._living_holder(found)) is not None:
                return holder
            _held_here.add(self._owner)
            try:
                self._write(absent=found is None, replaces=found.version if found else None)
            except ConflictError:
                continue
            return None

    def _heartbeat(self) -> None:
        renewed = time.monotonic()
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                self._write(absent=False, replaces=self._version, patient=False)
                renewed = time.monotonic()
            except ConflictError:
                self._lost.set()
                return
            except Exception:
                # The bucket is gone, or credentials have expired meanwhile; whatever the library
                # that renews these raises, the lease is not lost yet, nor is it held for ever.
                if time.monotonic() - renewed > EXPIRY_SECONDS:
                    self._lost.set()
                    return

    def _give_back(self) -> None:
        _held_here.discard(self._owner)
        try:
            if self._version and not self._lost.is_set():
                self._bucket.impatient().put(self._name, _FREE, replaces=self._version)
        except GebError:
            # It expires by itself; what went wrong before must not be hidden by this.
            return

    def _write(self, *, absent: bool, replaces: Version | None, patient: bool = True) -> None:
        record = _Record.of_this_process(self._owner).model_dump_json().encode()
        bucket = self._bucket if patient else self._bucket.impatient()
        self._version = bucket.put(self._name, record, absent=absent, replaces=replaces)

    def _living_holder(self, found: Found) -> dict[str, Any] | None:
        if found.data == _FREE:
            return None
        try:
            record = _Record.model_validate_json(found.data)
        except ValidationError:
            # Damaged. A holder that lives loses it as it renews, before it expires here.
            holder = {"host": "unknown", "pid": "unknown"}
        else:
            if record.is_dead():
                return None
            holder = record.model_dump()
        return holder if self._bucket.now() - found.modified <= EXPIRY_SECONDS else None
