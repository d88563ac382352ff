"""Names that people give to runs, sweeps and comparisons; each names a folder of the store."""

import re

from stages.contract.errors import UserError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
# File systems take 255 bytes; a run's name ends where its configuration says.
_LONGEST = 200


def is_name(text: str) -> bool:
    """True for what can name a folder of the store: `../elsewhere` cannot."""
    # The pattern's end alone would let a line end pass.
    return re.fullmatch(NAME_PATTERN, text) is not None and len(text) <= _LONGEST


def require_name(text: str, what: str) -> str:
    """The name of a sweep or comparison; UserError if it cannot name a folder of the store."""
    if not is_name(text):
        raise UserError(
            f"{text!r} cannot name a {what}",
            f"use letters, digits, dots, dashes and underscores, {_LONGEST} of them at the most, "
            "and begin with a letter or digit",
        )
    return text
