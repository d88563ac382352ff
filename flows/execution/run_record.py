"""Run records: the configuration of a run, and state and key of each of its steps.

A record informs people. Whether a step is done, only the store's artifacts tell.
"""

from __future__ import annotations

import os
import shlex
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from flows.pipeline.config import RunConfig
from flows.pipeline.loading import check_config
from flows.pipeline.names import is_name
from stages.contract.atomic import write_atomically
from stages.contract.errors import DamagedRecordError, UserError
from stages.contract.records import MisplacedError, read_json_record, read_record
from stages.contract.store import Store

State = Literal["running", "preempted", "done", "reused", "failed", "stopped"]


class DamagedRecordWarning(UserWarning):
    """A record that only informs cannot be read."""


class StepRecord(BaseModel):
    """Last known state of one step."""

    step: str
    stage: str
    key: str
    key_fields: dict[str, Any]
    state: State
    started: float
    ended: float | None = None
    message: str = ""


class RunRecord:
    """A run's folder in the store.

    Args:
        store: The store.
        name: Name of the run.
        refresh: True fetches the records of other hosts; :func:`runs` does so for all at once.
    """

    def __init__(self, store: Store, name: str, *, refresh: bool = True) -> None:
        self.store = store
        self.name = name
        self.path = store.run_path(name)
        if refresh:
            store.refresh(f"runs/{name}")

    @classmethod
    def existing(cls, store: Store, name: str) -> RunRecord:
        """A run that has been started before.

        Raises:
            UserError: The store has no such run.
        """
        # Before a path is made of it: `../elsewhere` is no name.
        if not is_name(name):
            raise UserError(
                f"{name!r} is not the name of a run", "`geb status` lists the runs of a store"
            )
        record = cls(store, name)
        if not os.path.lexists(record.path / "config.json"):
            known = ", ".join(runs(store)) or "none"
            raise UserError(f"no run {name!r} in {store.location}", f"runs there: {known}")
        return record

    def save_config(self, config: RunConfig) -> None:
        """Writes the resolved configuration; the one before is kept beside it."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / "config.json"
        text = config.to_json()
        if os.path.lexists(path) and not self.holds(config):
            kept = self.path / f"config-{time.strftime('%Y%m%d-%H%M%SZ', time.gmtime())}.json"
            _keep(path, kept)
            self.store.share(kept)
        write_atomically(path, text)
        self.store.share(path)

    def holds(self, config: RunConfig) -> bool:
        """True where the run was last started with this configuration."""
        path = self.path / "config.json"
        return os.path.lexists(path) and _holds(path, config.to_json())

    def config(self) -> RunConfig:
        """The configuration that the run was last started with."""
        path = self.path / "config.json"
        values = read_json_record(
            path,
            f"start the run again (`geb run CONFIG`), or copy the newest of {self.path}/"
            "config-*.json over it: the configurations that it had before",
        )
        return check_config(values, str(path))

    def save_step(self, record: StepRecord) -> None:
        """Writes the state of a step."""
        path = self.path / "steps" / (record.step.replace("/", "~") + ".json")
        write_atomically(path, record.model_dump_json(indent=2))
        self.store.share(path)

    def step(self, name: str) -> StepRecord | None:
        """Last known state of one step, or None."""
        try:
            return _read_step(self.path / "steps" / (name.replace("/", "~") + ".json"))
        except (FileNotFoundError, DamagedRecordError):
            # The record only informs, so it counts as unknown.
            return None

    def steps(self, *, strict: bool = False) -> Iterator[StepRecord]:
        """All steps on record, by name; a damaged record is left out with a warning.

        Args:
            strict: Raise in place of the warning.

        Raises:
            DamagedRecordError: A record cannot be read, and ``strict``.
        """
        for path in sorted((self.path / "steps").glob("*.json")):
            try:
                yield _read_step(path)
            except FileNotFoundError:
                # Another process renames it just now.
                continue
            except DamagedRecordError as error:
                if strict:
                    raise
                warnings.warn(DamagedRecordWarning(str(error)), stacklevel=2)


def resume_command(name: str, store: str) -> str:
    """The command that resumes a run, from any folder."""
    return shlex.join(["geb", "resume", name, "--store", store])


def runs(store: Store) -> list[str]:
    """Names of the store's runs, the last started first.

    A folder whose name no run can have, such as `nightly (copy)`, is none of them.
    """
    store.refresh("runs")
    configs = (store.root / "runs").glob("*/config.json")
    newest = sorted(configs, key=lambda path: path.lstat().st_mtime, reverse=True)
    return [each.parent.name for each in newest if is_name(each.parent.name)]


def recorded(store: Store) -> list[str]:
    """Names of everything that has steps on record: runs, evaluations, bandit experiments."""
    store.refresh("runs")
    return sorted({each.parents[1].name for each in (store.root / "runs").glob("*/steps/*.json")})


def _read_step(path: Path) -> StepRecord:
    try:
        return StepRecord.model_validate_json(read_record(path))
    except (MisplacedError, ValidationError) as error:
        raise DamagedRecordError(
            f"{path} is damaged: it is not the record of a step",
            "remove it; `geb resume RUN` writes it again",
        ) from error


def _holds(path: Path, text: str) -> bool:
    try:
        return read_record(path) == text.encode()
    except MisplacedError:
        return False


def _keep(path: Path, kept: Path) -> None:
    """Copies a configuration, so that the run has one whatever becomes of the next."""
    try:
        write_atomically(kept, read_record(path))
    except MisplacedError:
        path.replace(kept)
