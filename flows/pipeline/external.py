"""Files, folders and hub ids as inputs, addressed by content or by hub revision.

A model in a GGUF file is converted once, into a checkpoint in this host's cache.
"""

import re
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Literal

from stages.contract.digests import digest_of, sha256_file, state_of
from stages.contract.errors import StoreError, UserError
from stages.contract.events import Failure, parse_event
from stages.contract.request import ArtifactInput, FileInput, HubInput
from stages.store.locks import exclusive_lock
from stages.store.opening import cache_home

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Raised when a conversion of a GGUF file writes something else.
_CONVERSION = 2
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
External = FileInput | HubInput | ArtifactInput
RepoType = Literal["model", "dataset"]


class HubUnreachableError(StoreError):
    """The hub cannot be asked."""


# A thread that wants an input waits for another's hashing.
_LOCK = threading.Lock()


def resolve(place: str, repo_type: RepoType) -> External:
    """Turns a file, a folder or a hub id (``owner/name@revision``) into an input with an identity.

    A process hashes each file, and asks the hub for each revision, once: a plan and its run, and
    the runs of a sweep, so have the same inputs. Files whose size or time of modification changes
    are hashed again.

    Raises:
        UserError: The place is neither a file nor a hub id.
        HubUnreachableError: The hub cannot be asked for the revision.
    """
    with _LOCK:
        return resolved(place, repo_type, state_of(Path(place).expanduser()))


@cache
def resolved(place: str, repo_type: RepoType, state: str) -> External:
    """The input at a place whose files are in a state; see :func:`resolve`."""
    path = Path(place).expanduser()
    if repo_type == "model" and (gguf := gguf_file(path)):
        path = checkpoint_of(gguf)
    if path.exists():
        # Before it is read: a change meanwhile then shows.
        state = state_of(path)
        return FileInput(location=str(path.absolute()), digest=digest_of(path), state=state)
    repo, _, revision = place.partition("@")
    if not _HUB_ID.fullmatch(repo) or path.suffix in (".jsonl", ".json", ".parquet", ".py"):
        raise UserError(
            f"no such file or folder: {place}", "correct the path, or name a hub id (owner/name)"
        )
    if not _COMMIT.fullmatch(revision):
        revision = _resolve_revision(repo, revision or "main", repo_type)
    return HubInput(repo=repo, revision=revision, repo_type=repo_type)


def unread(place: str, repo_type: RepoType) -> External:
    """An input that is neither read nor asked for: its place stands for its content.

    Steps made of it can be listed and compared with each other, not computed.
    """
    path = Path(place).expanduser()
    repo, _, revision = place.partition("@")
    if path.exists() or not _HUB_ID.fullmatch(repo):
        return FileInput(location=str(path.absolute()), digest=place)
    return HubInput(repo=repo, revision=revision or "main", repo_type=repo_type)


def _resolve_revision(repo: str, revision: str, repo_type: RepoType) -> str:
    # Only here, so that runs on local files neither need nor load the client.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().repo_info(repo, revision=revision, repo_type=repo_type)
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(
            f"no such file or folder: {repo}, and the hub gives no {repo_type} of that name at "
            f"{revision!r} ({type(error).__name__})",
            "correct the path, the hub id (owner/name) or the revision; for a gated or private one "
            "accept its terms and set HF_TOKEN",
        ) from error
    except Exception as error:
        # Whatever else it is comes from the client's transport, which is another library with
        # each of its major versions.
        raise HubUnreachableError(
            f"cannot ask the hub for the revision of {repo} ({type(error).__name__}: {error}); "
            f"name a commit (`{repo}@<40 hex digits>`) or a local folder to run without it"
        ) from error
    assert info.sha is not None
    return info.sha


def gguf_file(place: Path) -> Path | None:
    """The GGUF file that a place is, or that is the only model of a folder; None otherwise.

    Raises:
        UserError: A folder holds several of them and no checkpoint.
    """
    if place.is_file():
        return place if place.suffix == ".gguf" else None
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{place} holds {len(files)} GGUF files", "name one of them")
    return files[0] if files else None


def checkpoint_of(file: Path, dtype: str = "bfloat16") -> Path:
    """Folder of the checkpoint in safetensors that a GGUF file was converted to.

    The folder is named by the file's digest, so that equal files are converted once.

    Raises:
        UserError: The file cannot be converted.
        StoreError: The conversion was ended, by want of memory for example.
    """
    models = cache_home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    target = models / f"{file.stem}-{dtype}-{sha256_file(file)[:16]}-{_CONVERSION}"
    with exclusive_lock(models / ".lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=models) as scratch:
                made = Path(scratch) / "checkpoint"
                _convert(file, made, dtype)
                made.replace(target)
    return target


def _convert(file: Path, checkpoint: Path, dtype: str) -> None:
    """Converts a GGUF file in a process of its own: an orchestrator loads no torch."""
    arguments = ["stages.modeling.gguf", str(file), str(checkpoint), dtype]
    command = [sys.executable, "-P", "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    event = parse_event(done.stdout.strip().rpartition("\n")[2])
    if isinstance(event, Failure) and event.kind == "user":
        raise UserError(event.message, event.remedy)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise StoreError(f"the conversion of {file} ended with code {done.returncode}: {last}")
