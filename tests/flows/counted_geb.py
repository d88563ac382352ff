"""The `geb` command, which counts how often it hashes each input and how many figures it saves.

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
from stages.contract import digests

if __name__ == "__main__":
    place = Path(sys.argv.pop(1))
    hashed: Counter[str] = Counter()
    figures = 0
    save, digest = Figure.savefig, digests.sha256_file

    def count_hashed(path: Path) -> str:
        hashed[os.fspath(path)] += 1
        return digest(path)

    def count_saved(figure: Figure, *arguments: Any, **options: Any) -> None:
        global figures
        figures += 1
        save(figure, *arguments, **options)

    # Replaced in the module, to count calls; to mypy a function is no variable.
    digests.sha256_file = count_hashed  # type: ignore[attr-defined]
    Figure.savefig = count_saved  # type: ignore[method-assign]
    try:
        main()
    finally:
        place.write_text(json.dumps({"hashed": hashed, "figures": figures}))
