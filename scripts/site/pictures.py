"""Pictures of a run's report for the documentation: light, dark, and as wide as a phone.

    geb report RUN
    python scripts/site/pictures.py store/runs/RUN/report.html docs/report

needs a Chromium on the path.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

# Name, colour scheme, width, height in pixels, heading that the picture begins with.
PICTURES = (
    ("report-light", "light", 1200, 1000, ""),
    ("report-curves", "light", 1200, 900, "Results by iteration"),
    ("report-dark", "dark", 1200, 900, "Learning"),
    ("report-phone", "light", 390, 844, ""),
)
_QUALITY = 80
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(report: Path, folder: Path) -> None:
    """Takes all pictures of a report into a folder, as WebP."""
    folder.mkdir(parents=True, exist_ok=True)
    browser_path = next(filter(None, map(shutil.which, _BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, scheme, width, height, heading in PICTURES:
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            page.goto(report.absolute().as_uri())
            if heading:
                page.get_by_role("heading", name=heading, exact=True).evaluate(
                    "heading => heading.scrollIntoView()"
                )
            picture = Image.open(io.BytesIO(page.screenshot()))
            picture.save(folder / f"{name}.webp", quality=_QUALITY)
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
