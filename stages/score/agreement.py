"""Errors for answers of servers that break the agreed schema."""

from __future__ import annotations

from pydantic import ValidationError

from stages.contract.errors import UserError
from stages.remote.client import first_problem, start_of


def not_agreed(url: str, body: bytes, what: str | ValidationError) -> UserError:
    """The error of an answer that is not what was agreed."""
    if isinstance(what, ValidationError):
        what = first_problem(what)
    return UserError(
        f"the answer of {url} is not what was agreed: {what}; it begins {start_of(body)}",
        "correct the server; docs/oracles.md has the schema",
    )
