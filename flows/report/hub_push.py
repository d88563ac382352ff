"""A copied model's way to the hub: one commit, and an upload that goes on where it was cut off."""

import os
from pathlib import Path

from stages.contract.errors import GebError, UserError

_TOKEN = "HF_TOKEN"


def require_token() -> str:
    """The hub's token in the environment; UserError if there is none."""
    if token := os.environ.get(_TOKEN):
        return token
    raise UserError(
        f"{_TOKEN} is not set: the hub takes models of known accounts alone",
        f"make a token with write access in the hub's settings, and export {_TOKEN}",
    )


def push(folder: Path, repo: str, *, revision: str | None, private: bool, message: str) -> str:
    """Uploads a folder as one commit of a model repository; returns the commit's address.

    The repository is made if there is none, and a branch ``revision`` of its main one. The hub
    keeps the large files that reached it before an upload was cut off: the same call sends the
    others, and then commits. Files of the repository that the folder lacks stay.

    Raises:
        UserError: The name is none, the token may not write there, or a repository that was to be
            private is public.
        GebError: The upload was cut off.
    """
    # Here: the client takes half a second to load, and most exports stay on the disk.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=require_token())
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise UserError(
                f"the repository {repo} is there and public, and --private was asked for",
                "make it private in the hub's settings, or name another one",
            )
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, commit_message=message
        )
    except HFValidationError as error:
        raise UserError(f"{repo!r} names no repository: {error}", "write OWNER/NAME") from error
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise UserError(
                f"the hub refuses a push to {repo}: {error}",
                f"give {_TOKEN} a token with write access to it",
            ) from error
        # Whatever else it is comes from the client's transport, which is another library with
        # each of its major versions.
        cause = error.__cause__ or error
        raise GebError(
            f"the push to {repo} was cut off ({type(cause).__name__}: {cause}); the same command "
            "goes on with it"
        ) from error
    return done.commit_url
