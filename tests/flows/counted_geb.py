"""The `geb` command, which counts the files that it opens and the figures that it saves.

``python -m tests.flows.counted_geb COUNTS ARGUMENT...`` writes them as JSON to the file COUNTS.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flows.commands.cli import main

if __name__ == "__main__":
    place = Path(sys.argv.pop(1))
    opened: Counter[str] = Counter()
    figures = 0
    save = Figure.savefig

    def count_opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            opened[os.fspath(arguments[0])] += 1

    def count_saved(figure: Figure, *arguments: Any, **options: Any) -> None:
        global figures
        figures += 1
        save(figure, *arguments, **options)

    sys.addaudithook(count_opened)
    Figure.savefig = count_saved  # type: ignore[method-assign]
    try:
        main()
    finally:
        place.write_text(json.dumps({"opened": opened, "figures": figures}))
