"""Interface of a store, wherever it is: artifacts under content addresses, and shared records."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from stages.contract.errors import DamagedArtifactError
from stages.contract.lease import Lease
from stages.contract.manifest import Manifest
from stages.contract.request import ArtifactInput

MARKER = "store.json"
FORMAT = 1

OnBytes = Callable[[int, int], None]
"""Called now and then, in the calling thread, with bytes done and bytes in all; may raise."""


@dataclass(frozen=True)
class Artifact:
    """An artifact of the store.

    Attributes:
        path: Its folder on this machine. Read its files by :meth:`file`: they may not be here yet.
        manifest: What it is.
    """

    path: Path
    manifest: Manifest

    def file(self, path: str = "", on_bytes: OnBytes | None = None) -> Path:
        """A file or folder of the artifact on this machine, brought here if it was not.

        Args:
            path: Its path in the artifact; all of it if empty.
            on_bytes: Is told of a download's progress.

        Raises:
            DamagedArtifactError: What came is not what the manifest says.
        """
        return self.path / path

    def read_json(self, path: str) -> dict[str, Any]:
        """Content of a file that holds one JSON object.

        Raises:
            DamagedArtifactError: It holds something else.
        """
        file = self.file(path)
        try:
            content = json.loads(file.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("no JSON object")
        except (ValueError, RecursionError) as error:
            raise DamagedArtifactError(
                f"damaged artifact: {file} is no JSON object ({error}); delete the folder "
                f"{self.path}, and `geb resume` computes it again"
            ) from error
        return content

    def address(self, path: str = "") -> str:
        """Address of a file or folder of the artifact, for a person."""
        return str(self.path / path)

    def ref(self, path: str = "") -> ArtifactInput:
        """Reference to the artifact, or to one file or folder of it, for a request."""
        manifest = self.manifest
        return ArtifactInput(
            stage=manifest.stage, key=manifest.key, path=path, digest=manifest.digest(path)
        )


Kind = Literal["artifact", "work", "scratch", "aside", "temporary"]


@dataclass(frozen=True)
class Held:
    """Something that takes room in a store.

    Attributes:
        kind: An artifact, the state of an attempt, what a killed one left, what was set aside, or a
            record that was being written when its writer died.
        stage: Its stage; empty where nobody knows.
        key: Its key.
        place: Where it is, below the store's root.
        bytes: Its size.
        written: When something in it was last written, in seconds since the epoch.
    """

    kind: Kind
    stage: str
    key: str
    place: str
    bytes: int
    written: float


class Store(Protocol):
    """A store of artifacts, leases, run records and registered models.

    :class:`~stages.contract.local_store.LocalStore` is one in a folder,
    :class:`~stages.contract.remote.store.RemoteStore` one in a bucket.
    """

    root: Path
    """Folder of the store, or of this host's copy of its records."""
    location: str
    """Address that opens this store again, on any host that sees it."""

    def run_path(self, run: str) -> Path:
        """Folder of a run's record."""
        return self.root / "runs" / run

    @abstractmethod
    def lease(self, stage: str, key: str) -> Lease:
        """The lease on computing a key."""

    @abstractmethod
    def work_files(self, stage: str, key: str) -> frozenset[str]:
        """Names of what attempts at a key have saved so far: checkpoints, finished chunks.

        An attempt that got further than the one before has saved something under a new name.
        """

    @abstractmethod
    def load(self, stage: str, key: str, path: str = "") -> Artifact | None:
        """Finds and checks an artifact.

        Args:
            stage: The artifact's stage.
            key: Its key.
            path: File or folder of it that is checked; all of it if empty.

        Returns:
            The artifact, or None when there is nothing under the key.

        Raises:
            StoreError: The store cannot be read.
            DamagedArtifactError: The artifact is not what its manifest says.
        """

    @abstractmethod
    def find(self, stage: str, key: str, *, warn: Callable[[str], None]) -> Artifact | None:
        """Like :meth:`load`, but sets a damaged artifact aside, says so, and returns None."""

    @abstractmethod
    def manifest(self, stage: str, key: str) -> Manifest | None:
        """An artifact's manifest, its files unchecked; None when there is nothing under the key.

        Raises:
            DamagedArtifactError: It cannot be read.
        """

    @abstractmethod
    def verify(self, artifact: Artifact) -> None:
        """Hashes every file of an artifact.

        Raises:
            DamagedArtifactError: A file is missing or differs.
        """

    @abstractmethod
    def set_aside(self, stage: str, key: str) -> str:
        """Moves an artifact into quarantine and returns its new place."""

    @abstractmethod
    def artifacts(self, stage: str | None = None) -> Iterator[tuple[str, str]]:
        """Yields (stage, key) of all artifacts, in order of their names."""

    @abstractmethod
    def held(self) -> Iterator[Held]:
        """Yields everything that takes room, for garbage collection."""

    @abstractmethod
    def remove(self, held: Held) -> None:
        """Deletes something that :meth:`held` told of."""

    @abstractmethod
    def refresh(self, folder: str) -> None:
        """Makes the records in a folder of the store (``runs/<name>``) those that all hosts see."""

    @abstractmethod
    def share(self, path: Path) -> str:
        """Shows a file of the store, or all files of a folder, to all hosts.

        Returns:
            Its address, for a person.
        """

    @abstractmethod
    def exclusive(self, folder: str) -> AbstractContextManager[None]:
        """Keeps other hosts from the records in a folder, and shows them what is changed within."""
