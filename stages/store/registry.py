"""The model registry: numbered versions of named models, and aliases that move between them.

Layout under the store's root::

    models/<name>.json    all versions of a model, and every move of its aliases
    models/<name>.lock    held while the file is written

Files appear by rename: a reader needs no lock and never sees half of one. The alias ``latest`` is
in no file; it means the version registered last. A name alone means the version of the alias
``production``, or the version registered last if the model has no such alias.
"""

import datetime
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from stages.contract.atomic import explain_disk_errors, write_atomically
from stages.contract.errors import UserError
from stages.contract.records import Record, read_record
from stages.contract.request import ArtifactInput
from stages.store.base import Artifact, Store
from stages.store.locks import exclusive_lock

LATEST = "latest"
_FOLDER = "models"
_REMEDY = (
    "restore it from a backup; without it the model's versions and aliases are forgotten, and each "
    "run's has to be registered again (`geb resume RUN --from iteration-1/promote`) before `geb gc`"
)


def require_alias(alias: str) -> str:
    """The alias, if it is one that can be moved; UserError otherwise."""
    if alias == LATEST or not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", alias):
        raise UserError(
            f"{alias!r} is not an alias that can be moved",
            f"use letters, digits, '.', '_' and '-', a letter first; {LATEST!r} always means the "
            "version registered last",
        )
    return alias


class ModelVersion(Record):
    """One registered checkpoint."""

    name: str
    version: int
    """1, 2, 3, … within the name."""
    checkpoint: ArtifactInput
    """The checkpoint's place in the store, with its digest."""
    figures: dict[str, dict[str, Any]]
    """Its evaluations by the digest of oracle, sampling and prompts, the newest last."""
    run: str
    step: str
    iteration: int = 0
    """Iteration in that run; 0 outside of iterations."""
    created: str
    """UTC, ISO 8601."""

    @property
    def metrics(self) -> dict[str, Any]:
        """Figures of the newest evaluation."""
        return list(self.figures.values())[-1]


class AliasMove(Record):
    """One entry of an alias's history."""

    version: int
    reason: str
    time: str
    """UTC, ISO 8601."""


Alias = list[AliasMove]
"""Every move of an alias, oldest first; it means the version of the last one."""


class _Model(Record):
    format: Literal[1] = 1
    versions: list[ModelVersion]
    aliases: dict[str, Alias]


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
        iteration: int = 0,
    ) -> ModelVersion:
        """Adds a checkpoint as the next version of ``name``.

        A checkpoint that is a version already, by its digest, stays that version, and gets its
        first figures that were ``measured_by`` this oracle, sampling and prompts.

        Raises:
            UserError: ``name`` is not a name.
            StoreError: The registry cannot be written.
        """
        with self.locked(name):
            model = self._read(name)
            for present in model.versions:
                if present.checkpoint.digest == checkpoint.digest:
                    version = present
                    break
            else:
                version = ModelVersion(
                    name=name,
                    version=len(model.versions) + 1,
                    checkpoint=checkpoint,
                    figures={},
                    run=run,
                    step=step,
                    iteration=iteration,
                    created=_now(),
                )
                model.versions.append(version)
            if measured_by not in version.figures:
                version.figures[measured_by] = metrics
                self._write(name, model)
            return version

    def set_alias(self, name: str, alias: str, version: int, *, reason: str = "") -> None:
        """Makes ``alias`` mean ``version``; nothing happens if it does already.

        Raises:
            UserError: The version is missing, or the alias cannot be moved.
        """
        require_alias(alias)
        with self.locked(name):
            self.version(name, version)
            model = self._read(name)
            moves = model.aliases.setdefault(alias, [])
            if not moves or moves[-1].version != version:
                moves.append(AliasMove(version=version, reason=reason, time=_now()))
                self._write(name, model)

    def names(self) -> list[str]:
        """Names of the registered models, in order."""
        return sorted(path.stem for path in self._root.glob("*.json"))

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions of a model, oldest first."""
        return self._read(name).versions

    def aliases(self, name: str) -> dict[str, Alias]:
        """All aliases of a model by their names, ``latest`` not among them."""
        return self._read(name).aliases

    def version(self, name: str, version: int) -> ModelVersion:
        """One version of a model; UserError if the model has no such version."""
        versions = self._existing(name).versions
        if not 0 < version <= len(versions):
            raise UserError(
                f"model {name!r} has no version {version}", f"it has 1 to {len(versions)}"
            )
        return versions[version - 1]

    def find(self, model: str) -> ModelVersion:
        """The version that ``name``, ``name@alias`` or ``name:version`` means, or UserError."""
        name, _, alias = model.partition("@")
        name, colon, number = name.partition(":")
        if colon:
            # Python reads no number of thousands of digits.
            if alias or not re.fullmatch(r"\d{1,9}", number):
                raise UserError(
                    f"{model!r} names no model", "write name, name@alias or name:version"
                )
            return self.version(name, int(number))
        # A name alone means its production version: the newest one may have failed its gates.
        existing = self._existing(name)
        moves = existing.aliases.get(alias or "production")
        if moves:
            return self.version(name, moves[-1].version)
        if alias not in ("", LATEST):
            raise UserError(
                f"model {name!r} has no alias {alias!r}",
                f"it has: {', '.join([LATEST, *existing.aliases])}; or name a version",
            )
        return existing.versions[-1]

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

    def _read(self, name: str) -> _Model:
        try:
            return read_record(self._path(name), _Model, _REMEDY)
        except FileNotFoundError:
            return _Model(versions=[], aliases={})

    def _write(self, name: str, model: _Model) -> None:
        write_atomically(self._path(name), model.model_dump_json(indent=2), durable=True)

    def _path(self, name: str) -> Path:
        # The form of a run's name, too: it is the model's unless another is given.
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(
                f"{name!r} is not a model name",
                "use letters, digits, '.', '_' and '-', none of '.' and '-' first",
            )
        return self._root / f"{name}.json"

    def _existing(self, name: str) -> _Model:
        """A model with versions; UserError if there is none."""
        model = self._read(name)
        if not model.versions:
            raise UserError(
                f"the registry has no model {name!r}; a folder is ./{name}",
                f"registered models: {', '.join(self.names()) or 'none'}",
            )
        return model

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keeps others from a model's records within the block, which may change them."""
        if self._is_locked:
            yield
            return
        with (
            explain_disk_errors(self._store.root),
            self._store.exclusive(_FOLDER),
            exclusive_lock(self._path(name).with_suffix(".lock")),
        ):
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
