"""Builds of images that fail, and an engine that does: a program stands for Docker's own."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError
from requests.models import Response

from flows.images import build as building
from flows.images.table import IMAGES
from flows.runners.docker import container as engines
from stages.contract.errors import GebError, UserError
from tests.flows.test_docker_options import Engine


@pytest.mark.parametrize(
    ("base", "program", "kind", "says"),
    [
        ("base", None, UserError, "there is no command `docker`"),
        ("base", "exit 3", GebError, "`docker build` has ended with exit code 3"),
        ("lacking", '[ "$1" = build ]', UserError, "no base image lacking: `docker pull` has"),
    ],
)
def test_a_build_that_fails_says_at_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, program: str | None, kind, says: str
) -> None:
    (tmp_path / "wheelhouse.json").write_text("a stamp")
    monkeypatch.setenv("GEB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "ensure_wheelhouse", lambda *_: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    if program is not None:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "docker").chmod(0o755)
    engine: Any = Engine(base=SimpleNamespace(attrs={"Size": 1}))
    engine.list = lambda repository: []
    with pytest.raises(GebError, match=says) as caught:
        building.build(engine, IMAGES[0], base, None, 10001, str)
    assert type(caught.value) is kind


def test_an_engine_that_fails_ends_the_list_with_a_message(
    monkeypatch: pytest.MonkeyPatch, geb_here: Callable[..., tuple[int, str]]
) -> None:
    def fail(name: str) -> None:
        answer = Response()
        answer.status_code = 500
        raise APIError("no", answer, "the storage driver is broken")

    engine = Engine()
    monkeypatch.setattr(engine, "get", fail)
    monkeypatch.setattr(engines, "connect", lambda: engine)
    code, said = geb_here("images", "list")
    assert code == 1
    assert "the storage driver is broken" in said
