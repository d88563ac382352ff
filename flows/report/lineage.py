"""Ancestors of an artifact, each once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.store.base import Store


@dataclass(frozen=True)
class Source:
    """One input of an artifact: another artifact, or something from outside the store."""

    name: str
    """``stage/key`` of an artifact, or the place of a file or hub repository."""
    digest: str
    is_artifact: bool
    revision: str = ""
    """Commit of a hub repository; empty for all else."""

    def title(self) -> str:
        """Short form for a person."""
        if self.revision:
            return f"{self.name}@{self.revision[:12]}"
        if not self.is_artifact:
            return f"{self.name} ({self.digest[:12]})"
        stage, _, key = self.name.partition("/")
        return f"{stage} {key[:12]}"


@dataclass(frozen=True)
class Ancestor:
    """An artifact, by which run's step it was made, and its inputs by name."""

    stage: str
    key: str
    made_by: str
    inputs: dict[str, list[Source]]

    @property
    def name(self) -> str:
        """``stage/key``, as sources name it."""
        return f"{self.stage}/{self.key}"


def lineage_of(store: Store, stage: str, key: str) -> list[Ancestor]:
    """An artifact and all that it was made of, each once and before its own inputs."""
    found: dict[str, Ancestor] = {}
    order: list[Ancestor] = []
    # Depth first: an artifact is listed after everything that was made of it.
    stack = [(f"{stage}/{key}", False)]
    while stack:
        name, is_done = stack.pop()
        if is_done:
            order.append(found[name])
        elif name not in found:
            # Read here and once: of a bucket, each manifest is a request.
            found[name] = _ancestor(store, *name.split("/"))
            stack.append((name, True))
            for sources in reversed(found[name].inputs.values()):
                stack += [(each.name, False) for each in reversed(sources) if each.is_artifact]
    return order[::-1]


def _ancestor(store: Store, stage: str, key: str) -> Ancestor:
    manifest = store.manifest(stage, key)
    if manifest is None:
        return Ancestor(stage, key, "gone from the store", {})
    inputs = {name: [_source(each) for each in group] for name, group in manifest.inputs.items()}
    return Ancestor(stage, key, f"{manifest.run}, {manifest.step}", inputs)


def _source(record: Mapping[str, Any]) -> Source:
    if record["kind"] == "artifact":
        return Source(f"{record['stage']}/{record['key']}", record["digest"], True)
    if record["kind"] == "hub":
        return Source(record["repo"], record["digest"], False, record["revision"])
    return Source(record["location"], record["digest"], False)
