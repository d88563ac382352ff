"""Stores of a campaign's runs, in a folder or in a bucket: copied from a calm run's, damaged."""

from __future__ import annotations

import json
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from stages.contract.errors import DamagedArtifactError
from stages.contract.manifest import MANIFEST
from stages.store.base import Store
from stages.store.remote.bucket import Bucket
from stages.store.remote.store import RemoteStore

RUN = "chaos"
# Folders of a bucket whose objects are damaged.
_DAMAGED = ("artifacts", "work")


class Place(ABC):
    """A store with one run.

    Attributes:
        location: The store, as ``geb`` takes it.
    """

    location: str

    @abstractmethod
    def open(self) -> Store:
        """The store as a new host sees it: nothing is cached."""

    @abstractmethod
    def forget(self, keys: Iterable[tuple[str, str]]) -> None:
        """Removes artifacts by stage and key."""

    @abstractmethod
    def files(self) -> list[str]:
        """Names of all files of artifacts and of attempts that are not empty."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Content of a file."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Puts other content into a file."""

    @abstractmethod
    def manifests(self) -> dict[str, bytes]:
        """Manifests of the finished artifacts by their files' names."""

    def records(self) -> dict[str, dict[str, Any]]:
        """The run's records of steps by name."""
        store = self.open()
        store.refresh(f"runs/{RUN}")
        paths = sorted((store.run_path(RUN) / "steps").glob("*.json"))
        records = [json.loads(path.read_text()) for path in paths]
        return {record["step"]: record for record in records}

    def digests(self) -> dict[str, str]:
        """Digests of every step's artifact as its files are now, telemetry left out."""
        opened = self.open()
        digests = {}
        for name, record in self.records().items():
            try:
                artifact = opened.load(record["stage"], record["key"])
                if artifact is not None:
                    opened.verify(artifact)
                    digests[name] = artifact.manifest.digest()
            except DamagedArtifactError as error:
                # A finding of the campaign, not its end.
                digests[name] = str(error)
        return digests

    def damage(self, draw: random.Random) -> str:
        """Flips a bit of a file, and one in four times truncates it; its name, if any."""
        if not (names := self.files()):
            return ""
        name = draw.choice(names)
        data = bytearray(self.read(name))
        if draw.random() < 0.25:
            del data[len(data) // 2 :]
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        self.write(name, bytes(data))
        return name


class FolderPlace(Place):
    """A store in a folder.

    Args:
        folder: The store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.location = str(folder)

    def copy_to(self, folder: Path, execution: Mapping[str, Any]) -> FolderPlace:
        """A copy whose run has these settings of `execution`."""
        shutil.copytree(self._folder, folder, copy_function=shutil.copy2)
        path = folder / "runs" / RUN / "config.json"
        values = json.loads(path.read_text())
        values["execution"] |= execution
        path.write_text(json.dumps(values))
        return FolderPlace(folder)

    def open(self) -> Store:
        """See :class:`Place`."""
        return Store.in_folder(self.location)

    def forget(self, keys: Iterable[tuple[str, str]]) -> None:
        """See :class:`Place`."""
        for stage, key in keys:
            shutil.rmtree(self._folder / "artifacts" / stage / key, ignore_errors=True)

    def files(self) -> list[str]:
        """See :class:`Place`."""
        return [
            str(path.relative_to(self._folder))
            for folder in ("artifacts", "work")
            for path in sorted((self._folder / folder).rglob("*"))
            if path.is_file() and path.stat().st_size
        ]

    def manifests(self) -> dict[str, bytes]:
        """See :class:`Place`."""
        paths = self._folder.glob(f"artifacts/*/[!.]*/{MANIFEST}")
        return {str(path.relative_to(self._folder)): path.read_bytes() for path in paths}

    def read(self, name: str) -> bytes:
        """See :class:`Place`."""
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """See :class:`Place`."""
        (self._folder / name).write_bytes(content)


class BucketPlace(Place):
    """A store in a bucket.

    Args:
        url: Bucket and prefix.
        home: Folder for the local folders of new hosts.
    """

    def __init__(self, url: str, home: Path) -> None:
        self._bucket = Bucket(url)
        self._home = home
        self._hosts = count()
        self.location = url

    def copy_to(self, url: str, home: Path) -> BucketPlace:
        """A copy under another prefix."""
        copy = BucketPlace(url, home)
        for name in self._bucket.list():
            if entry := self._bucket.get(name):
                copy.write(name, entry.data)
        return copy

    def open(self) -> Store:
        """See :class:`Place`."""
        return RemoteStore.connect(self.location, self.new_host())

    def new_host(self) -> Path:
        """Folder of a host that has never seen the store."""
        return self._home / f"host-{next(self._hosts)}"

    def forget(self, keys: Iterable[tuple[str, str]]) -> None:
        """See :class:`Place`."""
        store = self.open()
        gone = set(keys)
        for entry in list(store.entries()):
            if (entry.stage, entry.key) in gone:
                store.remove(entry)

    def files(self) -> list[str]:
        """See :class:`Place`."""
        return [
            name
            for name, entry in sorted(self._bucket.list().items())
            if name.split("/")[0] in _DAMAGED and entry.size
        ]

    def manifests(self) -> dict[str, bytes]:
        """See :class:`Place`."""
        names = self._bucket.list()
        return {
            name: self.read(name)
            for name in names
            if name.startswith("artifacts/") and name.endswith(f"/{MANIFEST}")
        }

    def read(self, name: str) -> bytes:
        """See :class:`Place`."""
        content = self._bucket.get(name)
        assert content is not None, name
        return content.data

    def write(self, name: str, content: bytes) -> None:
        """See :class:`Place`."""
        self._bucket.put(name, content)
