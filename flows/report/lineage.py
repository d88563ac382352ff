"""Ancestors of an artifact: a graph in which each stands once, as a list and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.report.files import render, write_file
from stages.contract.store import Store

_BOX_WIDTH, _BOX_HEIGHT = 190, 40
_GAP_X, _GAP_Y = 60, 18
_SWEEPS = 8
# From (x, y) to (x, y).
_Line = tuple[float, float, float, float]


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
    inputs: Mapping[str, Sequence[Source]]

    @property
    def name(self) -> str:
        """``stage/key``, as sources name it."""
        return f"{self.stage}/{self.key}"

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "stage": self.stage,
            "key": self.key,
            "made_by": self.made_by,
            "inputs": {
                name: [vars(source) for source in sources] for name, sources in self.inputs.items()
            },
        }


@dataclass(frozen=True)
class _Box:
    """An artifact or an outside input; `x` and `y` of its upper left corner are in pixels."""

    name: str
    title: str
    detail: str
    is_outside: bool
    x: float
    y: float


def lineage_of(store: Store, stage: str, key: str) -> list[Ancestor]:
    """An artifact and all that it was made of, each once and before its own inputs."""
    found: dict[str, Ancestor] = {}
    order: list[str] = []
    # Depth first: an artifact is listed after everything that was made of it.
    stack = [(f"{stage}/{key}", False)]
    while stack:
        name, is_done = stack.pop()
        if is_done:
            order.append(name)
            continue
        if name in found:
            continue
        # Read here and once: of a bucket, each manifest is a request.
        found[name] = _ancestor(store, *name.split("/"))
        stack.append((name, True))
        for sources in reversed(list(found[name].inputs.values())):
            stack += [(each.name, False) for each in reversed(sources) if each.is_artifact]
    return [found[name] for name in reversed(order)]


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


def write_graph(ancestors: Sequence[Ancestor], path: Path) -> None:
    """Draws the graph, inputs on the left, into a page that needs no network."""
    boxes, lines = _layout(ancestors)
    width = max(box.x for box in boxes) + _BOX_WIDTH + 20
    height = max(box.y for box in boxes) + _BOX_HEIGHT + 20
    page = render(
        "lineage.html.jinja",
        title=f"{ancestors[0].stage} {ancestors[0].key[:12]}",
        boxes=boxes,
        lines=lines,
        size=(width, height),
        box=(_BOX_WIDTH, _BOX_HEIGHT),
    )
    write_file(path, page)


def _layout(ancestors: Sequence[Ancestor]) -> tuple[list[_Box], list[_Line]]:
    """Columns by the longest way from an outside input; rows near those of the inputs."""
    parents = {
        each.name: list(
            dict.fromkeys(source.name for group in each.inputs.values() for source in group)
        )
        for each in ancestors
    }
    shown = {each.name: (each.stage, each.made_by) for each in ancestors}
    for each in ancestors:
        for group in each.inputs.values():
            for source in group:
                if not source.is_artifact:
                    shown.setdefault(source.name, (Path(source.name).name, "from outside"))
    columns = _columns(ancestors, parents)
    layers: dict[int, list[str]] = {}
    for name in shown:
        layers.setdefault(columns.get(name, 0), []).append(name)
    rows = _rows(layers, parents)
    boxes = {
        name: _Box(
            name=name,
            title=title,
            detail=detail,
            is_outside=name not in parents,
            x=10 + columns.get(name, 0) * (_BOX_WIDTH + _GAP_X),
            y=10 + rows[name] * (_BOX_HEIGHT + _GAP_Y),
        )
        for name, (title, detail) in shown.items()
    }
    middle = _BOX_HEIGHT / 2
    lines = [
        (
            boxes[source].x + _BOX_WIDTH,
            boxes[source].y + middle,
            boxes[name].x,
            boxes[name].y + middle,
        )
        for name, sources in parents.items()
        for source in sources
    ]
    return list(boxes.values()), lines


def _columns(ancestors: Sequence[Ancestor], parents: Mapping[str, list[str]]) -> dict[str, int]:
    columns: dict[str, int] = {}
    for each in reversed(ancestors):
        columns[each.name] = 1 + max(
            (columns.get(name, 0) for name in parents[each.name]), default=0
        )
    return columns


def _rows(layers: Mapping[int, list[str]], parents: Mapping[str, list[str]]) -> dict[str, float]:
    """Row of each box: in a few sweeps each moves to the middle of what it is joined with."""
    joined: dict[str, list[str]] = {}
    for name, sources in parents.items():
        for source in sources:
            joined.setdefault(name, []).append(source)
            joined.setdefault(source, []).append(name)
    rows = {name: float(row) for names in layers.values() for row, name in enumerate(names)}
    for _ in range(_SWEEPS):
        for names in layers.values():
            middle = {
                name: sum(rows[each] for each in joined.get(name, [name]))
                / len(joined.get(name, [name]))
                for name in names
            }
            names.sort(key=lambda name: (middle[name], name))
            rows |= {name: float(row) for row, name in enumerate(names)}
    return rows
