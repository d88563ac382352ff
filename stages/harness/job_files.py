"""Files of a job that shares no folder with its orchestrator, carried through the bucket.

``python -m stages.harness.job_files ADDRESS FOLDER`` runs beside the stage and sends what the job
writes into a folder of its node; the orchestrator receives it in a folder of its own. Below the
address in the bucket are::

    wanted            there as long as the orchestrator wants the job
    <file>/<offset>   a piece of a file that grows, by its place in it
"""

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from stages.contract.atomic import write_atomically
from stages.contract.errors import ConflictError, StoreError
from stages.store.remote.bucket import Bucket

STATUS_FILE = "status"
"""End of the job, the last file that is written."""
STOP_FILE = "stop"
"""Exists when the orchestrator wants the job to end."""
_GROWING = ("events", "log", "slurm.out")
_WANTED = "wanted"
_SECONDS = 1.0
# A file may have grown for long while the bucket did not answer.
_PIECE_BYTES = 8 << 20


class JobFiles:
    """Files of a job in a folder of this host, and their pieces in the bucket."""

    def __init__(self, address: str, folder: Path) -> None:
        self._bucket = Bucket(address)
        self._folder = folder
        # Bytes that have been sent or received of each file.
        self._done: dict[str, int] = {}

    def want(self) -> None:
        """Marks the job as wanted, without which it does not start."""
        self._bucket.put(_WANTED, b"")

    def unwant(self) -> None:
        """Makes the job end, or not start."""
        self._bucket.delete([_WANTED])

    def remove(self) -> None:
        """Removes what the bucket has of the job, which is not wanted any more."""
        self._bucket.delete(self._bucket.list())

    def receive(self) -> None:
        """Adds to the files of this host what the job has sent; its status comes last."""
        status = self._bucket.get(f"{STATUS_FILE}/0")
        for name in _GROWING:
            place = self._folder / name
            place.touch()
            # From the start at first: an orchestrator that was killed may have left half a piece.
            with place.open("r+b") as file:
                done = file.seek(self._done.get(name, 0))
                while (piece := self._bucket.get(f"{name}/{done}")) is not None:
                    file.write(piece.data)
                    self._done[name] = done = file.tell()
        if status is not None:
            write_atomically(self._folder / STATUS_FILE, status.data.decode())

    def exchange(self) -> bool:
        """Sends what the job has written by now; returns True if it has ended.

        Makes a job that is not wanted end.
        """
        has_ended = (self._folder / STATUS_FILE).exists()
        for name in (*_GROWING, *([STATUS_FILE] if has_ended else [])):
            with suppress(FileNotFoundError), (self._folder / name).open("rb") as file:
                self._send(name, file)
        if self._bucket.get(_WANTED) is None:
            (self._folder / STOP_FILE).touch()
        return has_ended

    def _send(self, name: str, file: BinaryIO) -> None:
        """Sends what has been added to a file since the last call."""
        start = file.seek(self._done.get(name, 0))
        while data := file.read(_PIECE_BYTES):
            piece = f"{name}/{start}"
            try:
                self._bucket.put(piece, data, absent=True)
            except ConflictError:
                # An earlier try, whose answer got lost, has sent a shorter piece.
                file.seek(start + self._bucket.head(piece).size)
            self._done[name] = start = file.tell()


def main() -> None:
    """Exchanges the files of a job until it has ended; StoreError if the bucket is away then."""
    # Slurm ends the stage; what it says then has to be sent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address, folder = sys.argv[1:]
    files = JobFiles(address, Path(folder))
    status = Path(folder) / STATUS_FILE
    has_ended = False
    while not has_ended:
        time.sleep(_SECONDS)
        try:
            has_ended = files.exchange()
        except StoreError:
            if status.exists():
                raise


if __name__ == "__main__":
    main()
