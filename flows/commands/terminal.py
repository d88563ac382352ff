"""Terminals: what models, oracles and files say is shown, and never obeyed.

An escape sequence in a response may overwrite lines or write to the clipboard, and a bidi mark may
make one word look like another.
"""

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

# Colours and weights of a program's log, which are left out.
_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_KEPT = "\n\t"
_SHOWN = {
    # The pictures of control characters that Unicode has.
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    # Marks, embeddings, overrides and isolates of writing directions.
    **dict.fromkeys(
        (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"
    ),
}


def neutral(text: str) -> str:
    """The text with control characters and bidi marks as signs that a terminal only shows."""
    return _STYLES.sub("", text).translate(_SHOWN)


class TerminalConsole(Console):
    """A console whose own styles are all that a terminal obeys."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Renders with every text neutral; see :func:`neutral`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(neutral(segment.text), segment.style)


def messages() -> TerminalConsole:
    """A console for messages, on stderr."""
    return TerminalConsole(stderr=True, highlight=False, soft_wrap=True)


def show_warning(message: str) -> None:
    """Prints a warning on stderr: stdout may be for a document."""
    messages().print(f"[bold yellow]warning[/] {escape(message)}")
