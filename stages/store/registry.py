"""The model registry: numbered versions of named models, and aliases that move between them.

Layout under the store's root::

    models/<name>/versions/<n>.json    what version n is; evaluations add figures
    models/<name>/aliases/<alias>.json which version an alias means, and which it meant before
    models/<name>/lock                 held while a version or an alias is written

Files appear by rename: a reader needs no lock and never sees half of one. The alias ``latest`` has
no file; it means the version registered last, whatever a crash may have interrupted.
"""

import datetime
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from stages.contract.atomic import explain_disk_errors, write_atomically
from stages.contract.errors import UserError
from stages.contract.records import read_record
from stages.contract.request import ArtifactInput
from stages.store.base import Artifact, Store
from stages.store.locks import exclusive_lock


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


R = TypeVar("R", bound=_Record)


class ModelVersion(_Record):
    """One registered checkpoint."""

    format: Literal[1] = 1
    name: str
    version: int
    """1, 2, 3, … within the name."""
    checkpoint: ArtifactInput
    """The checkpoint's place in the store, with its digest."""
    figures: dict[str, dict[str, Any]]
    """Its evaluations by the digest of oracle, sampling and prompts, the newest last."""
    run: str
    step: str
    created: str
    """UTC, ISO 8601."""

    @property
    def metrics(self) -> dict[str, Any]:
        """Figures of the newest evaluation."""
        return list(self.figures.values())[-1]


class AliasMove(_Record):
    """One entry of an alias's history."""

    version: int
    reason: str
    time: str
    """UTC, ISO 8601."""


class Alias(_Record):
    """Version that an alias names, and the history of its changes."""

    format: Literal[1] = 1
    alias: str
    version: int
    history: tuple[AliasMove, ...] = ()
    """Every move, oldest first."""


def read(path: Path, kind: type[R]) -> R | None:
    """Reads a record; None if there is none, DamagedRecordError if it is of another kind."""
    remedy = (
        "restore it from a backup, or remove it and register (`geb resume RUN --from "
        "iteration-1/promote`) or set (`geb promote MODEL:VERSION`) it again"
    )
    try:
        return read_record(path, kind, remedy)
    except FileNotFoundError:
        return None


LATEST = "latest"
_FOLDER = "models"


class ModelRegistry:
    """The registry of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = store.root / _FOLDER
        self._is_locked = False
        store.refresh(_FOLDER)

    def register(
        self,
        name: str,
        checkpoint: ArtifactInput,
        *,
        metrics: dict[str, Any],
        measured_by: str = "",
        run: str = "",
        step: str = "",
    ) -> ModelVersion:
        """Adds a checkpoint as the next version of ``name``.

        A checkpoint that is a version already, by its digest, stays that version, and gets its
        first figures that were ``measured_by`` this oracle, sampling and prompts.

        Raises:
            UserError: ``name`` is not a name.
            StoreError: The registry cannot be written.
        """
        with self.locked(name):
            versions = self.versions(name)
            version = ModelVersion(
                name=name,
                version=versions[-1].version + 1 if versions else 1,
                checkpoint=checkpoint,
                figures={},
                run=run,
                step=step,
                created=_now(),
            )
            for present in versions:
                if present.checkpoint.digest == checkpoint.digest:
                    version = present
            if measured_by not in version.figures:
                version.figures[measured_by] = metrics
                path = self._folder(name) / "versions" / f"{version.version}.json"
                write_atomically(path, version.model_dump_json(indent=2), durable=True)
            return version

    def set_alias(self, name: str, alias: str, version: int, *, reason: str = "") -> Alias:
        """Makes ``alias`` mean ``version``; nothing happens if it does already.

        Raises:
            UserError: The version is missing, or the alias cannot be moved.
        """
        path = self._alias_path(name, alias)
        with self.locked(name):
            self.version(name, version)
            now = read(path, Alias) or Alias(alias=alias, version=0)
            if now.version == version:
                return now
            move = AliasMove(version=version, reason=reason, time=_now())
            moved = Alias(alias=alias, version=version, history=(*now.history, move))
            write_atomically(path, moved.model_dump_json(indent=2), durable=True)
            return moved

    def names(self) -> list[str]:
        """Names of the registered models, in order."""
        return sorted({path.parts[-3] for path in self._root.glob("*/versions/*.json")})

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions of a model, oldest first."""
        versions = self._records(name, "versions", ModelVersion)
        return sorted(versions, key=lambda version: version.version)

    def aliases(self, name: str) -> list[Alias]:
        """All aliases of a model in order of their names, ``latest`` not among them."""
        return self._records(name, "aliases", Alias)

    def alias(self, name: str, alias: str) -> Alias:
        """Version that an alias names; UserError if the model has no such alias."""
        record = read(self._alias_path(name, alias), Alias)
        if record is None:
            self._existing(name)
            aliases = ", ".join([LATEST, *(present.alias for present in self.aliases(name))])
            raise UserError(
                f"model {name!r} has no alias {alias!r}", f"it has: {aliases}; or name a version"
            )
        return record

    def version(self, name: str, version: int) -> ModelVersion:
        """One version of a model; UserError if the model has no such version."""
        record = read(self._folder(name) / "versions" / f"{version}.json", ModelVersion)
        if record is None:
            numbers = [present.version for present in self._existing(name)]
            raise UserError(f"model {name!r} has no version {version}", f"it has {numbers}")
        return record

    def find(self, model: str) -> ModelVersion:
        """The version that ``name``, ``name@alias`` or ``name:version`` means, or UserError."""
        name, _, alias = model.partition("@")
        if alias and alias != LATEST:
            return self.version(name, self.alias(name, alias).version)
        name, colon, number = name.partition(":")
        if colon:
            # Python reads no number of thousands of digits.
            if alias or not re.fullmatch(r"\d{1,9}", number):
                raise UserError(
                    f"{model!r} names no model", "write name, name@alias or name:version"
                )
            return self.version(name, int(number))
        return self._existing(name)[-1]

    def resolve(self, model: str) -> tuple[ModelVersion, Artifact]:
        """The version that ``model`` means (see :meth:`find`), and what its checkpoint belongs to.

        Raises:
            UserError: The version or its checkpoint is missing.
            DamagedArtifactError: The checkpoint's files have changed since it was registered.
        """
        version = self.find(model)
        reference = version.checkpoint
        artifact = self._store.load(reference.stage, reference.key)
        if artifact is None or artifact.manifest.digest(reference.path) != reference.digest:
            raise UserError(
                f"the checkpoint of {version.name}:{version.version} is no longer in the store "
                f"({reference.stage}/{reference.key[:12]})",
                f"resume the run {version.run!r}, which makes it again, or use another version",
            )
        return version, artifact

    def all_versions(self) -> list[ModelVersion]:
        """All versions of all models: their checkpoints must not be collected as garbage."""
        return [version for name in self.names() for version in self.versions(name)]

    def _records(self, name: str, folder: str, kind: type[R]) -> list[R]:
        paths = sorted((self._folder(name) / folder).glob("*.json"))
        return [record for path in paths if (record := read(path, kind))]

    def _folder(self, name: str) -> Path:
        # The form of a run's name, too: it is the model's unless another is given.
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(
                f"{name!r} is not a model name",
                "use letters, digits, '.', '_' and '-', none of '.' and '-' first",
            )
        return self._root / name

    def _alias_path(self, name: str, alias: str) -> Path:
        if alias == LATEST:
            raise UserError(
                f"{LATEST!r} always means the version registered last and cannot be moved",
                "use another alias, such as 'production'",
            )
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", alias):
            raise UserError(
                f"{alias!r} is not an alias",
                "use letters, digits, '.', '_' and '-', a letter first",
            )
        return self._folder(name) / "aliases" / f"{alias}.json"

    def _existing(self, name: str) -> list[ModelVersion]:
        """All versions of a model; UserError if there is none."""
        versions = self.versions(name)
        if not versions:
            raise UserError(
                f"the registry has no model {name!r}; a folder is ./{name}",
                f"registered models: {', '.join(self.names()) or 'none'}",
            )
        return versions

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keeps others from a model's records within the block, which may change them."""
        if self._is_locked:
            yield
            return
        with (
            explain_disk_errors(self._store.root),
            self._store.exclusive(_FOLDER),
            exclusive_lock(self._folder(name) / "lock"),
        ):
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
