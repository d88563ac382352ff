"""Checks of a request where its stage runs: stage and version, parameters, key, inputs."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from stages.contract.context import ResolvedInput
from stages.contract.digests import digest_of, files_of, sha256_of, state_of
from stages.contract.errors import DamagedArtifactError, UserError
from stages.contract.local_store import LocalStore
from stages.contract.params import StageParams
from stages.contract.request import (
    ArtifactInput,
    FileInput,
    HubInput,
    Request,
    check_sources,
    key_fields,
)

# Oracles, templates and most prompts. Larger inputs, such as weights, are hashed only where their
# sizes or times of modification have changed: it takes minutes.
_HASHED_BYTES = 256 << 20


def read_request(path: Path) -> Request:
    """Reads a request.

    Raises:
        UserError: There is none, or it is damaged.
    """
    try:
        return Request.read(path)
    except OSError as error:
        raise UserError(f"cannot read the request {path}: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(f"{path} is not a request: {error}") from error


def checked_params(kind: type[StageParams], request: Request) -> StageParams:
    """Parameters of a request, whose key and inputs are checked as well.

    Args:
        kind: Type of the parameters; names the stage and its version.
        request: The request.

    Raises:
        UserError: It is for another stage or version, or something in it is wrong.
    """
    if request.stage != kind.stage:
        raise UserError(f"the request is for stage {request.stage!r}, this is {kind.stage!r}")
    if request.version != kind.version:
        raise UserError(
            f"the request wants {kind.stage} version {request.version}, this program is version "
            f"{kind.version}",
            "install the same version of geb for the orchestrator and for the stage (rebuild the "
            "image, or the stage's environment)",
        )
    try:
        params = kind.model_validate(request.params)
    except ValidationError as error:
        raise UserError(f"wrong parameters for {kind.stage}: {error}") from error
    if sha256_of(key_fields(params, request.seed, request.inputs)) != request.key:
        raise UserError(
            f"the request's key {request.key[:12]} is not the key of its content",
            "make requests with stages.contract.request.make_request",
        )
    check_sources(params, request.inputs)
    return params


def resolved_input(
    store: LocalStore, name: str, source: ArtifactInput | FileInput | HubInput
) -> ResolvedInput:
    """Finds one input on this machine and checks that it is what the request names.

    Args:
        store: The store.
        name: Name of the input, for messages.
        source: The input as the request has it.

    Raises:
        UserError: A file from outside is not there, or was changed since the request was made.
        DamagedArtifactError: The store lacks the artifact, or has another content of it.
    """
    if isinstance(source, HubInput):
        return ResolvedInput(source, None)
    if isinstance(source, FileInput):
        return ResolvedInput(source, _checked_file(name, source))
    artifact = store.load(source.stage, source.key, source.path)
    if artifact is None or artifact.manifest.digest(source.path) != source.digest:
        raise DamagedArtifactError(
            f"input {name!r}: the store has no artifact {source.stage}/{source.key[:12]} with "
            f"digest {source.digest[:12]}"
        )
    return ResolvedInput(source, artifact.path / source.path, artifact)


def _checked_file(name: str, source: FileInput) -> Path:
    """Place of an external input, whose content is compared with the request's.

    Raises:
        UserError: It is not there, or was changed since the request was made: its artifact would
            stand for another content ever after.
    """
    path = Path(source.location)
    if not path.exists():
        raise UserError(f"input {name!r}: no such file or folder: {path}", "check the path")
    size = sum(each.stat().st_size for each in ([path] if path.is_file() else files_of(path)))
    seems_same = size > _HASHED_BYTES and source.state in (None, state_of(path))
    if not seems_same and digest_of(path) != source.digest:
        raise UserError(
            f"input {name!r}: {path} has changed since the run looked at it",
            "resume the run, which then reads it as it is now, or restore it",
        )
    return path
