"""Names that become folders of the store: of runs, sweeps and comparisons."""

from __future__ import annotations

import re

from stages.contract.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# File systems take 255 bytes; a run's name ends where its configuration says.
_LONGEST = 200


def is_name(text: str) -> bool:
    """True for what can name a folder of the store: `../elsewhere` cannot."""
    return _NAME.fullmatch(text) is not None and len(text) <= _LONGEST


def require_name(text: str, what: str) -> str:
    """The name of a sweep or comparison, as it is.

    Args:
        text: The name that a person gives.
        what: The thing that it is to name.

    Raises:
        UserError: It cannot name a folder of the store.
    """
    if not is_name(text):
        raise UserError(
            f"{text!r} cannot name a {what}",
            f"use letters, digits, dots, dashes and underscores, {_LONGEST} of them at the most, "
            "and begin with a letter or digit",
        )
    return text
