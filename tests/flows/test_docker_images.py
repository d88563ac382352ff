"""The image of a stage by name and digest, without an engine: a table stands for what it has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from flows.images.table import CODE_LABEL, VERSION_LABEL, geb_version
from flows.pipeline.placement import DockerSettings
from flows.runners.docker.images import Images
from stages.contract.errors import UserError
from stages.contract.local_store import LocalStore
from stages.contract.provenance import stages_digest
from stages.contract.request import Request
from tests.probe_requests import probe_request

TRUSTED, OTHER, PULLED = (f"sha256:{digit * 64}" for digit in "123")
NAME = "registry.example/geb-probe:1"


class Engine:
    """Images by the names that an engine knows them by."""

    def __init__(self, **named: Any) -> None:
        self.named = named
        self.images = self

    def get(self, name: str) -> Any:
        if name not in self.named:
            raise ImageNotFound(name)
        return self.named[name]


def image(digest: str, *of_registries: str, **labels: str) -> Any:
    labels = {CODE_LABEL: stages_digest(), VERSION_LABEL: geb_version()} | labels
    digests = [f"registry.example/geb-probe@{each}" for each in of_registries]
    return SimpleNamespace(id=digest, attrs={"Config": {"Labels": labels}, "RepoDigests": digests})


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return probe_request(LocalStore.open(str(tmp_path / "store"), create=True))


def images(name: str) -> Images:
    return Images(DockerSettings(images={"probe": name}))


@pytest.mark.parametrize("trusted", [TRUSTED, PULLED])
def test_a_tampered_image_is_refused_by_name(request_: Request, trusted: str) -> None:
    pinned = images(f"{NAME}@{trusted}")
    whole = image(TRUSTED, PULLED)
    _, named = pinned.find(Engine(**{NAME: whole}), request_)
    assert named == f"{NAME}@{PULLED}"
    tampered = Engine(**{NAME: image(OTHER)})
    with pytest.raises(UserError, match=f"image {NAME} is {OTHER}, not {trusted}") as caught:
        images(f"{NAME}@{trusted}").find(tampered, request_)
    assert "tampered with" in caught.value.message
    assert "execution.docker.images.probe" in caught.value.message


def test_a_name_that_moves_during_a_run_changes_nothing_in_it(request_: Request) -> None:
    first = image(TRUSTED)
    engine = Engine(**{NAME: first, TRUSTED: first})
    run = images(NAME)
    assert run.find(engine, request_) == (first, f"{NAME}@{TRUSTED}")
    engine.named[NAME] = image(OTHER)
    assert run.find(engine, request_) == (first, f"{NAME}@{TRUSTED}")
    del engine.named[TRUSTED]
    with pytest.raises(UserError, match=f"{NAME} was {TRUSTED} when the run came to need it"):
        run.find(engine, request_)


@pytest.mark.parametrize(
    ("label", "said"),
    [(CODE_LABEL, "holds other code of the stages"), (VERSION_LABEL, "holds geb other")],
)
def test_an_image_of_other_code_is_refused(request_: Request, label: str, said: str) -> None:
    with pytest.raises(UserError, match=f"image {NAME} {said}"):
        images(NAME).find(Engine(**{NAME: image(TRUSTED, **{label: "other"})}), request_)
