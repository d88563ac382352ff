"""Builds of images at once, and an engine that fails: a table stands for what the engine has."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound
from requests.exceptions import ConnectionError as EngineGoneError
from requests.models import Response

from flows.commands import cli
from flows.images import build as building
from flows.images import wheelhouse
from flows.images.build import Options, build
from flows.images.table import Image
from flows.runners.docker import container as engines
from stages.contract.errors import GebError, UserError

IMAGE = Image("demo", "a test", (), "constraints/torch.txt")
WAIT_SECONDS = 120


class Engine:
    """Images by their tags; a build needs the image that its wheels are in."""

    def __init__(self) -> None:
        self.tags = {"base"}
        self.images = self.api = self
        self.import_answer = ""
        self.meets: Callable[[str], None] = lambda wheels: None

    def get(self, name: str) -> Any:
        if name not in self.tags:
            raise ImageNotFound(name)
        return SimpleNamespace(id=name, tags=[name], attrs={"Size": 1})

    def list(self, repository: str) -> list[Any]:
        return [self.get(tag) for tag in sorted(self.tags) if tag.startswith(f"{repository}:")]

    def remove(self, name: str, *, force: bool = False) -> None:
        self.tags.discard(name)

    def import_image_from_stream(self, chunks: Any, repository: str, tag: str) -> str:
        assert b"".join(chunks)
        self.tags.add(f"{repository}:{tag}")
        return self.import_answer

    def build(self, tag: str, buildargs: dict[str, str], **rest: Any) -> Iterator[dict[str, str]]:
        self.meets(buildargs["WHEELS"])
        self.get(buildargs["WHEELS"])
        self.tags.add(tag)
        yield {"stream": "built"}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GEB_CACHE", raising=False)
    monkeypatch.setattr(building, "ensure_wheelhouse", lambda image, index, say: Path(index))
    return Engine()


def wheels(folder: Path, content: str) -> str:
    """A wheelhouse; the options of a build name it, in place of an index."""
    folder.mkdir(parents=True)
    (folder / "demo.whl").write_text(content)
    return str(folder)


def build_demo(engine: Any, folder: str, say: Callable[[str], object]) -> Image:
    """Builds the image with the wheels of a folder."""
    return build(engine, IMAGE, Options("base", folder), say)


def test_a_build_waits_for_another_one_whose_wheels_it_would_remove(
    engine: Engine, tmp_path: Path
) -> None:
    first = wheels(tmp_path / "one/demo", "1")
    second = wheels(tmp_path / "two/demo", "22")
    under_way, other_came = threading.Event(), threading.Event()
    said: list[str] = []

    def meet(name: str) -> None:
        # The first one is at work until the second one waits, or is at work as well.
        if under_way.is_set():
            other_came.set()
        under_way.set()
        assert other_came.wait(WAIT_SECONDS)

    def say(line: str) -> None:
        said.append(line)
        if "another build" in line:
            other_came.set()

    engine.meets = meet
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(build_demo, engine, first, say)
        assert under_way.wait(WAIT_SECONDS)
        two = pool.submit(build_demo, engine, second, say)
        assert one.result().tag == two.result().tag == IMAGE.tag
    assert "another build of demo is at work: waiting for its end" in said
    assert len(engine.list("geb-wheels-demo")) == 1, "those of the build before are removed"


def test_wheels_that_the_engine_could_not_import_end_the_build(
    engine: Engine, tmp_path: Path
) -> None:
    told = [{"status": "Importing"}, {"error": "no space left on device", "errorDetail": {}}]
    engine.import_answer = "\r\n".join(map(json.dumps, told))
    with pytest.raises(GebError, match=r"geb-wheels-demo:.*: no space left on device"):
        build_demo(engine, wheels(tmp_path / "demo", "1"), str)


def answer(code: int) -> Response:
    found = Response()
    found.status_code = code
    return found


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (APIError("no", answer(400), "invalid reference format"), UserError, "invalid reference"),
        (APIError("no", answer(500), "no space left on device"), GebError, "no space left"),
        (EngineGoneError("connection reset"), GebError, "does not answer any more"),
    ],
    ids=["refused", "failed", "gone"],
)
def test_an_error_of_the_engine_is_told_with_the_image(
    engine: Engine, tmp_path: Path, error: Exception, kind: type[GebError], said: str
) -> None:
    def fail(name: str) -> None:
        raise error

    engine.meets = fail
    with pytest.raises(GebError, match=f"image {IMAGE.tag}: the Docker engine .*{said}") as caught:
        build_demo(engine, wheels(tmp_path / "demo", "1"), str)
    assert type(caught.value) is kind


def test_an_engine_that_fails_ends_the_list_with_a_message(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise APIError("no", answer(500), "the storage driver is broken")

    monkeypatch.setattr(engine, "get", fail)
    monkeypatch.setattr(engines, "connect", lambda: engine)
    monkeypatch.setattr(sys, "argv", ["geb", "images", "list"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "the storage driver is broken" in capsys.readouterr().err


def test_what_a_killed_build_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheelhouse, "CACHE", tmp_path)
    left, others = tmp_path / ".demo-abc", tmp_path / ".demonstration-abc"
    for folder in (left, others):
        (folder / "wheels").mkdir(parents=True)
    monkeypatch.setattr(wheelhouse, "resolve", lambda *_: [])
    monkeypatch.setattr(wheelhouse, "_pip_wheel", lambda made, *_: made.mkdir(exist_ok=True))
    wheelhouse.ensure_wheelhouse(IMAGE, None, str)
    assert not left.exists()
    assert others.exists()
