"""Files, folders and hub ids as inputs, addressed by content or by hub revision."""

import re
import threading
from functools import cache
from pathlib import Path
from typing import Literal

from stages.contract.digests import digest_of, state_of
from stages.contract.errors import StoreError, UserError
from stages.contract.request import FileInput, HubInput, Input

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Externals = dict[str, list[Input]]
"""Inputs from outside the store, by the fields of `inputs`."""
RepoType = Literal["model", "dataset"]


class HubUnreachableError(StoreError):
    """The hub cannot be asked."""


# A thread that wants an input waits for another's hashing.
_LOCK = threading.Lock()


def resolve(location: str, repo_type: RepoType) -> Input:
    """Turns a file, a folder or a hub id (``owner/name@revision``) into an input with an identity.

    A process hashes each file, and asks the hub for each revision, once: a plan and its run, and
    the runs of a sweep, so have the same inputs. Files whose size or time of modification changes
    are hashed again.

    A relative path of two names is a hub id: :func:`anchored_input` has made paths absolute.

    Raises:
        UserError: The location is neither a file nor a hub id.
        HubUnreachableError: The hub cannot be asked for the revision.
    """
    with _LOCK:
        return _resolved(location, repo_type, state_of(Path(location).expanduser()))


@cache
def _resolved(location: str, repo_type: RepoType, state: str) -> Input:
    """The input at a location, in a state that is older than the digest: later changes show."""
    path = Path(location).expanduser()
    if path.exists() and not _HUB_ID.fullmatch(location):
        return FileInput(location=str(path.absolute()), digest=digest_of(path), state=state)
    repo, _, revision = location.partition("@")
    if not _HUB_ID.fullmatch(repo):
        raise UserError(
            f"no such file or folder: {location}", "correct the path, or name a hub id (owner/name)"
        )
    if not _COMMIT.fullmatch(revision):
        revision = _resolve_revision(repo, revision or "main", repo_type)
    return HubInput(repo=repo, revision=revision, repo_type=repo_type)


def unread(location: str, repo_type: RepoType) -> Input:
    """An input that is neither read nor looked up: its location replaces its content.

    Steps with it can be listed and compared with each other, not computed.
    """
    repo, _, revision = location.partition("@")
    if not _HUB_ID.fullmatch(repo):
        return FileInput(location=str(Path(location).expanduser().absolute()), digest=location)
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
            f"no such file or folder: {repo}, and the hub cannot be asked for its revision "
            f"({type(error).__name__}: {error}); name a commit (`{repo}@<40 hex digits>`) "
            f"or a local folder to run without it"
        ) from error
    assert info.sha is not None
    return info.sha
