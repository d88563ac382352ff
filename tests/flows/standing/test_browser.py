"""The pipeline from the Prefect UI: fill the form, watch the run, read its report, press Retry."""

import json
from uuid import UUID

import pytest
from playwright.sync_api import expect

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.report.html import write
from flows.report.summary import Summary
from flows.report.table import FigureRow
from stages.evaluate.statistics import Estimate
from stages.store.base import Store
from tests.flows.report.evaluations import artifact_in
from tests.flows.standing.browser import (
    add_line,
    browser_page,
    choose,
    field,
    open_artifact,
    picture,
    see_end,
    submit,
)
from tests.flows.standing.standing import SMALL_OVERRIDES, failing_once

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def test_a_run_goes_from_the_form_over_a_retry_to_the_report(standing, tmp_path):
    with browser_page() as page:
        _open_form(page, standing)
        picture(page, "form")
        _fill_small(page, "small")
        see_end(page, standing.ui, *submit(page), "Completed")
        picture(page, "completed")
        open_artifact(page, "small-report")
        expect(page.get_by_role("columnheader", name="mean reward")).to_be_visible()
        assert page.get_by_role("columnheader").count() <= 7, "others are drawn over the page"
        expect(page.get_by_text("Report: ")).to_contain_text("report.html")
        _expect_plots(page)
        picture(page, "report")
        _open_form(page, standing)
        _fill_small(page, "mended")
        field(page, "oracle_code").fill(str(failing_once(tmp_path)))
        add_line(page, "generate.temperature=0.9")
        deployment, run = submit(page)
        see_end(page, standing.ui, deployment, run, "Failed")
        picture(page, "failed")
        states = standing.steps(UUID(run))
        # Whichever called the oracle first.
        [failed] = [name for name, state in states.items() if state == "Failed"]
        open_artifact(page, "mended-failure")
        expect(page.get_by_text("no route to the reward server").first).to_be_visible()
        resume = f"geb resume mended --store {standing.store}"
        expect(page.get_by_text(resume).first).to_be_visible()
        picture(page, "failure")
        page.goto(f"{standing.ui}/v2/runs/flow-run/{run}")
        _retry(page)
        see_end(page, standing.ui, deployment, run, "Completed")
        page.get_by_role("tab", name="Task Runs").click()
        expect(_task(page, failed).first).to_contain_text("Completed")
        picture(page, "retried")
        states = standing.steps(UUID(run))
        assert states["iteration-1/generate/0"] == "Cached"
        assert states[failed] == "Completed"


def test_samples_are_put_in_order_filtered_and_printed(tmp_path):
    record = RunRecord(Store.in_folder(str(tmp_path / "store"), create=True), "read")
    suites = {"extra": {"prompts": "extra.jsonl"}}
    config = RunConfig(name="read", iterations=1, suites=suites)
    record.save_config(config)
    artifacts = {}
    for place in ("iteration-1/evaluate", "iteration-1/evaluate/suite-extra"):
        folder = tmp_path / place / "own"
        folder.mkdir(parents=True)
        # The policy's score of each prompt; the base scores 0.5.
        scores = {"best": 1.0, "worst": 0.25, "rude": 0.75}
        lines = [
            {
                "prompt_id": name,
                "messages": [{"role": "user", "content": f"Ask {name} of {place}"}],
                "policy": [{"response": f"answer {name}", "score": score}],
                "base": [{"response": "before", "score": 0.5}],
            }
            for name, score in scores.items()
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "metrics.json").write_text("{}")
        artifacts[place] = artifact_in(folder)
    rows = [FigureRow(number) for number in (0, 1)]
    summary = Summary("read", config, "store", rows=rows, artifacts=artifacts)
    summary.suites["extra"] = [FigureRow(1, {"mean_reward": Estimate(0.5)})]
    write(record, summary)
    with browser_page() as page:
        page.goto((record.path / "report.html").as_uri())
        shown = page.locator("#samples .sample:visible > summary")

        def names():
            return [inner_text.split()[1] for inner_text in shown.all_inner_texts()]

        assert names() == ["best", "worst", "rude"]
        page.locator("#order").select_option("worst first")
        assert names() == ["worst", "rude", "best"]
        page.locator("#filter").select_option("fell")
        assert names() == ["worst"]
        page.locator("#filter").select_option("gained")
        page.locator("#search").fill("BEST")
        assert names() == ["best"]
        page.locator("#search").fill("")
        folded = page.locator("#samples").get_by_text("answer rude")
        expect(folded).to_be_hidden()
        of_suite = page.get_by_text("Ask best of iteration-1/evaluate/suite-extra").first
        expect(of_suite).to_be_hidden()
        page.get_by_text("Samples of 3 prompts").click()
        expect(of_suite).to_be_visible()
        page.emulate_media(media="print")
        expect(folded).to_be_visible()


def _expect_plots(page):
    """The plot of a run of one iteration is drawn; others have one point and are left out."""
    image = page.get_by_role("img", name="Mean reward, held-out prompts", exact=True)
    expect(image).to_be_visible()
    expect(image).not_to_have_js_property("naturalWidth", 0)


def _task(page, name):
    """Entries of a task in the list of a flow run, the newest first."""
    page.get_by_placeholder("Search by run name").fill(name)
    return page.locator("[data-slot=card]").filter(has=page.get_by_text(name, exact=True))


def _retry(page):
    page.get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name="Retry").click()
    page.get_by_role("button", name="Retry").last.click()
    expect(page.locator("[data-slot=badge]").filter(has_text="Failed")).to_have_count(0)


def _open_form(page, up):
    page.goto(up.ui)
    page.get_by_role("link", name="Deployments", exact=True).click()
    page.get_by_role("link", name="iterate", exact=True).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    expect(page.get_by_label("Select preset")).to_contain_text("quickstart")


def _fill_small(page, name):
    field(page, "name").fill(name)
    for section, values in SMALL_OVERRIDES.items():
        for field_name, value in values.items() if isinstance(values, dict) else ():
            add_line(page, f"{section}.{field_name}={json.dumps(value)}")
    field(page, "iterations").fill(str(SMALL_OVERRIDES["iterations"]))
    choose(page, "design", "one_minus_pi")
