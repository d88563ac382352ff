"""Prefect's V2 UI as a person uses it: the places of things on its pages."""

import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

# Flags that keep Chromium from reaching out and from needing a desktop.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Nothing here takes long but a run; the test's time limit bounds that.
_RUN_MILLISECONDS = 600_000
_PAGE_MILLISECONDS = 60_000
# SQLite refuses a write that began before another ended; a person presses Submit again.
_BUSY = 503
_SUBMITS = 5
_ENDED = re.compile("Completed|Failed|Crashed|Cancelled")
# A folder to keep pictures in, for the documentation.
_PICTURES = "GEB_PICTURES"


@contextmanager
def browser_page():
    """A page of a headless Chromium found on the path."""
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    assert path is not None, f"this test needs one of: {', '.join(_BROWSERS)}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.set_default_timeout(_PAGE_MILLISECONDS)
        expect.set_options(timeout=_PAGE_MILLISECONDS)
        yield page
        browser.close()


def field(page, name):
    """A field of the form, by its name."""
    return page.get_by_label(f"{name} (Optional)", exact=True)


def add_line(page, text):
    """Adds an entry to the form's list of settings."""
    entries = page.locator("fieldset textarea")
    before = entries.count()
    page.get_by_role("button", name="Add item").click()
    expect(entries).to_have_count(before + 1)
    entries.last.fill(text)


def choose(page, name, option):
    """Chooses an option of a field of the form."""
    page.get_by_label(f"Select {name}").click()
    page.get_by_role("option", name=option, exact=True).click()


def submit(page):
    """Starts the run of the form and returns the deployment's id and the run's."""
    for _ in range(_SUBMITS):
        # A busy database answers after a minute, the page's own patience.
        with page.expect_response(
            lambda answer: "create_flow_run" in answer.url, timeout=_RUN_MILLISECONDS
        ) as answer:
            page.get_by_role("button", name="Submit").click()
        if answer.value.status != _BUSY:
            break
    assert answer.value.ok, answer.value.text()
    started = answer.value.json()
    return started["deployment_id"], started["id"]


def see_end(page, ui, deployment, run, state):
    """Watches a deployment's list of runs until a run ends, and opens its page.

    The page of a run that is at work draws an animation, which costs this machine a core.
    """
    page.goto(f"{ui}/v2/deployments/deployment/{deployment}?tab=Runs")
    entry = page.locator("[data-slot=card]").filter(has=page.locator(f'a[href*="{run}"]'))
    ended = entry.locator("[data-slot=badge]").filter(has_text=_ENDED).first
    expect(ended).to_be_visible(timeout=_RUN_MILLISECONDS)
    page.goto(f"{ui}/v2/runs/flow-run/{run}")
    expect(page.locator("[data-slot=badge]").filter(has_text=_ENDED).first).to_have_text(state)


def open_artifact(page, key):
    """Opens the newest artifact of a key, from the page of the run that is shown."""
    page.get_by_role("tab", name="Artifacts").click()
    page.locator(f'a[href$="/artifacts/key/{key}"]').first.click()
    page.locator("main a[href*='/artifacts/artifact/']").first.click()


def picture(page, name):
    """Keeps a picture of the page where pictures are asked for."""
    folder = os.environ.get(_PICTURES)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Its tabs and lists load one after the other.
        page.wait_for_load_state("networkidle")
        page.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")
