"""Pictures of a run for the documentation: its report, and what a terminal of 80 columns shows.

    python scripts/site/pictures.py STORE RUN docs/report
    python scripts/site/pictures.py FILE.svg geb sweep CONFIG …     # the table at its end

needs `geb`, `script` (util-linux) and a Chromium on the path.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

# Name, width and height in pixels.
PICTURES = (("report-light", 1200, 1000), ("report-phone", 390, 844))
# Commands whose output is a picture.
COMMANDS = ("status", "report")
_COLUMNS = 80
_QUALITY = 80
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(store: Path, run: str, folder: Path) -> None:
    """Takes all pictures of a run into a folder: WebP of the report, SVG of the terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    for command in COMMANDS:
        picture = terminal("geb", command, run, "--store", str(store))
        (folder / f"terminal-{command}.svg").write_text(picture)
    take_report(store / "runs" / run / "report.html", folder)


def terminal(*command: str) -> str:
    """Output of a command on a terminal, as SVG without fonts from elsewhere."""
    recorded = subprocess.run(
        ["script", "-qec", f"stty cols {_COLUMNS}; {shlex.join(command)}", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    shown = recorded.replace("\r\n", "\n")
    if command[1] == "sweep":
        title = re.search(r"^(?:\x1b\[[\d;]*m)*By mean reward", shown, re.MULTILINE)
        shown = shown[title.start() if title else 0 :]
    console.print(Text.from_ansi(shown))
    # Without options: the store is wherever the pictures were taken.
    drawn = console.export_svg(title=shlex.join(command[:3]))
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)


def take_report(report: Path, folder: Path) -> None:
    """Takes the pictures of a report."""
    browser_path = next(filter(None, map(shutil.which, _BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, width, height in PICTURES:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(report.absolute().as_uri())
            picture = Image.open(io.BytesIO(page.screenshot()))
            picture.save(folder / f"{name}.webp", quality=_QUALITY)
            page.close()
        browser.close()


if __name__ == "__main__":
    if sys.argv[1].endswith(".svg"):
        Path(sys.argv[1]).write_text(terminal(*sys.argv[2:]))
    else:
        main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
