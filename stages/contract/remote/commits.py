"""Commits: an artifact in a bucket exists once this small object, written last, does."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.contract.errors import DamagedArtifactError
from stages.contract.manifest import Manifest
from stages.contract.remote.bucket import Bucket, Found
from stages.contract.remote.errors import ConflictError

# A commit is emptied, not deleted: every change is then a write on condition of the content before.
_NOTHING = b""
_QUARANTINE = "quarantine"


class Commit(BaseModel):
    """Record of an artifact in the bucket."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    """Folder of the files, below the store's prefix."""
    manifest: Manifest
    etags: dict[str, str]
    """Of each file's object; another one makes a hit hash the object."""


class Commits:
    """The commits of one store.

    Args:
        bucket: The store's bucket.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def get(self, stage: str, key: str) -> Commit | None:
        """An artifact's commit, or None.

        Raises:
            DamagedArtifactError: It cannot be read.
        """
        found = self._bucket.get(_name(stage, key))
        if found is None or found.data == _NOTHING:
            return None
        try:
            return Commit.model_validate_json(found.data)
        except ValidationError as error:
            raise DamagedArtifactError(
                f"damaged artifact: {self._bucket.url}/{_name(stage, key)} is unreadable"
            ) from error

    def add(self, commit: Commit) -> None:
        """Makes an artifact visible, unless there is one under the key by now."""
        name = _name(commit.manifest.stage, commit.manifest.key)
        before = self._bucket.get(name)
        data = commit.model_dump_json().encode()
        with contextlib.suppress(ConflictError):
            if before is None:
                self._bucket.put(name, data, absent=True)
            elif before.data == _NOTHING:
                self._bucket.put(name, data, replaces=before.version)

    def update(self, commit: Commit) -> None:
        """Replaces what is known of an artifact that is there, if nobody else changed it."""
        name = _name(commit.manifest.stage, commit.manifest.key)
        before = self._bucket.get(name)
        if before is not None and before.data != _NOTHING:
            with contextlib.suppress(ConflictError):
                self._bucket.put(name, commit.model_dump_json().encode(), replaces=before.version)

    def set_aside(self, stage: str, key: str) -> str:
        """Moves a commit into quarantine; the files stay. Returns its new place."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        aside = f"{_QUARANTINE}/{stage}-{key[:16]}-{stamp}-{uuid.uuid4().hex[:6]}.json"
        found = self._bucket.get(_name(stage, key))
        if found is not None and found.data != _NOTHING:
            self._bucket.put(aside, found.data)
            # Where somebody else was faster, the damaged one is aside as well.
            with contextlib.suppress(ConflictError):
                self._bucket.put(_name(stage, key), _NOTHING, replaces=found.version)
        return f"{self._bucket.url}/{aside}"

    def names(self) -> Iterator[tuple[str, str]]:
        """Yields (stage, key) of all artifacts, in order."""
        for name, entry in self._bucket.list("commits").items():
            stage, _, key = name.removesuffix(".json").partition("/")
            if entry.size:
                yield stage, key

    def all_there(self) -> dict[tuple[str, str], Commit]:
        """All readable commits."""
        names = {_name(*each): each for each in self.names()}
        found = self._bucket.get_all(names)
        return {names[name]: commit for name, commit in _readable(found).items()}

    def all_aside(self) -> dict[str, Commit | None]:
        """The commits in quarantine by the names of their objects; None for unreadable ones."""
        names = [f"{_QUARANTINE}/{name}" for name in self._bucket.list(_QUARANTINE)]
        readable = _readable(self._bucket.get_all(names))
        return {name: readable.get(name) for name in names}

    def delete(self, stage: str, key: str) -> None:
        """Makes an artifact disappear; its files stay."""
        self._bucket.delete([_name(stage, key)])


def _name(stage: str, key: str) -> str:
    return f"commits/{stage}/{key}.json"


def _readable(found: dict[str, Found]) -> dict[str, Commit]:
    commits = {}
    for name, each in found.items():
        with contextlib.suppress(ValidationError):
            commits[name] = Commit.model_validate_json(each.data)
    return commits
