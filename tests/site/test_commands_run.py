"""Commands in the blocks of README, CONTRIBUTING and docs work, in the order of each page.

A command is run here, on a small finished run; or another test runs it (:data:`ELSEWHERE`); or its
page tells the reader what it needs that a test does not have (:data:`MARK`). Commands in the middle
of a sentence are read by `test_commands.py`.
"""

import os
import re
import shutil
from dataclasses import dataclass

import pytest
import yaml

from tests.flows.loop import SMALL, geb_ok, steps
from tests.forking import forked_python
from tests.programs import run_program
from tests.site.test_commands import PAGES, ROOT

# Words before or after a block, or in a command's comment.
MARK = re.compile(
    r"\bneeds? [^.;:]{0,40}\b(GPUs?|cluster|Docker|network|hub|server|Chromium)\b"
    r"|\btakes (?:hours|long)\b"
)
# The same for a page, at its top.
MARK_OF_PAGE = re.compile(r"commands (?:on|of) this page need .{0,60}(GPU|cluster|Docker)")
PROGRAM = re.compile(
    r"\s*(?:\$ )?((?:[A-Z_]+=\S+ )*(?:[\w./]*bin/)?"
    r"(?:geb|make|prefect|python|pip|kubectl|docker|hf|jq|install|echo) .*)"
)
# Beginning of a command, or a page: a file and a text in it, of a test its name.
ELSEWHERE = {
    "docs/tutorial.md": "tests/flows/test_tutorial.py::test_the_tutorial_promotes",
    "make run": ".ci/run::make run",
    "make test-fast": ".ci/run::make test",
    "make test": ".ci/run::make test",
    "make test-all": ".ci/run::make test-rest",
    "make setup setup-vllm": ".ci/run::make setup-vllm",
    "make setup-eval": ".ci/run::make setup-eval",
    "make setup-trackers": ".ci/run::make setup-trackers",
    "make check": ".ci/run::make check",
    "make chaos": ".ci/run::make chaos",
    "make docs-serve": ".ci/run::make docs",
    "make images": "tests/docker/conftest.py::def images",
    "geb bandit": "tests/experiments/test_bandit.py::test_the_command_prints",
    "python -m benchmarks.rehearsal": "tests/experiments/test_rehearsal.py::test_every_preset",
    "geb up": "tests/flows/standing/test_up.py::test_up_is_found_by_other_commands",
    "geb run configs/quickstart.yaml --set store=s3:": "tests/flows/test_bucket_store.py::"
    "test_a_run_goes_on_and_ends_on_other_hosts",
    "geb status quickstart --store s3:": "tests/flows/test_bucket_store.py::"
    "test_a_run_goes_on_and_ends_on_other_hosts",
    "geb run CONFIG --set 'tracking.report_to": "tests/flows/test_tracking.py::"
    "test_a_resumed_run_continues_its_session",
    "GEB_PICTURES=docs/operations": "tests/flows/standing/test_browser.py::"
    "test_a_run_goes_from_the_form",
    "pip install -e '.[bucket]'": "Makefile::orchestrator,bucket",
    "python -P -m stages.training.node": "tests/stages/train/test_train_nodes.py::"
    "stages.training.node",
}
# Words of the pages, and what they are here.
WORDS = (
    (r"(?<!=)\[([^\]]*)\](?!')", r"\1"),
    (r"\b(CONFIG|geb\.yaml)\b", "configs/quickstart.yaml"),
    (r"\bMODEL:VERSION\b", "quickstart:1"),
    (r"\bRUN RUN\b", "quickstart quickstart-fdpo"),
    (r"\bRUN STEP\b", "quickstart sft"),
    (r"\bRUN\b", "quickstart"),
    (r"\bMODEL\b", "quickstart"),
    (r"\bPREFIX\b", "train"),
    (r"\bexamples/objective\.yaml", f"{ROOT}/examples/objective.yaml"),
    (r"\bgeb init DIR\b", "geb init task"),
    (r"\bDIR\b", "exported"),
    # One iteration and one seed: what is there is found.
    ("--from iteration-2", "--from iteration-1"),
    ("--set seed=1", ""),
    # A sweep in earnest: tests/flows/test_comparisons.py.
    (r"(geb sweep .*--seeds \S+)(?!.*--dry-run)", r"\1 --dry-run"),
)


@dataclass(frozen=True)
class Command:
    """A command that a page shows in a block."""

    page: str
    line: int
    text: str
    marked: bool

    @property
    def elsewhere(self):
        """Beginning by which :data:`ELSEWHERE` has it, the longest."""
        if "--dry-run" in self.text:
            return None
        patterns = [
            pattern
            for pattern in ELSEWHERE
            if self.page == pattern or re.match(rf"{re.escape(pattern)}(?![\w-])", self.text)
        ]
        return max(patterns, key=len, default=None)


def commands(page):
    """Commands of a page's blocks, fenced or indented."""
    name = page.relative_to(ROOT).as_posix()
    lines = page.read_text().splitlines()
    whole = MARK_OF_PAGE.search(" ".join(lines[:12])) is not None
    fenced, starts, block = False, 0, False
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        inside = fenced or (line.startswith("    ") and (block or not lines[number - 1].strip()))
        if inside and not block:
            starts = number
        block = inside
        if inside and (program := PROGRAM.fullmatch(line)):
            text, _, comment = program[1].partition(" # ")
            around = f"{_paragraph(lines, starts, -1)} {_paragraph(lines, number, 1)} {comment}"
            for one in text.split(" · "):
                marked = whole or MARK.search(around) is not None
                yield Command(name, number + 1, one.strip(), marked)


def _paragraph(lines, at, step):
    """Text of the nearest paragraph in a direction, on one line."""
    at += step
    while 0 <= at < len(lines) and (not lines[at].strip() or lines[at].startswith(("    ", "```"))):
        at += step
    commands = []
    while 0 <= at < len(lines) and lines[at].strip():
        commands.append(lines[at].strip())
        at += step
    return " ".join(commands[::step])


SHOWN = [command for page in PAGES for command in commands(page)]
RUN = [pattern for pattern in SHOWN if pattern.elsewhere is None and not pattern.marked]


def test_each_command_is_run_or_its_page_says_what_it_needs():
    for shown in SHOWN:
        covered = shown.elsewhere or shown.marked or re.search(r"(?:^|&& )geb ", shown.text)
        assert covered, f"{shown.page}:{shown.line}: {shown.text}: say there what it needs"
    used = {shown.elsewhere for shown in SHOWN}
    for beginning, place in ELSEWHERE.items():
        assert beginning in used, f"no page shows {beginning}"
        file, _, text = place.partition("::")
        assert text in (ROOT / file).read_text(), place


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
    """A folder as the pages have it: configurations, and a store with two finished runs."""
    place = tmp_path_factory.mktemp("pages")
    shutil.copytree(finished.parent / "store", place / "store", copy_function=shutil.copy2)
    (place / "configs").mkdir()
    for name in ("quickstart", "quickstart-fdpo"):
        values = SMALL | {"extends": str(ROOT / f"configs/{name}.yaml"), "name": name}
        config = place / f"configs/{name}.yaml"
        config.write_text(yaml.safe_dump(values | {"store": str(place / "store")}))
        geb_ok("run", config)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("page", list(dict.fromkeys(pattern.page for pattern in RUN)))
def test_the_commands_of_a_page_work(folder, page):
    key = steps(folder / "store", "quickstart")["iteration-1/train"]["key"]
    environment = os.environ | {"GEB_STORE": str(folder / "store"), "GEB_HOME": str(folder)}
    for command in dict.fromkeys(shown.text for shown in RUN if shown.page == page):
        text = command
        for pattern, here in (
            *WORDS,
            (r"\bKEY\b", key),
            ("-g geb", f"-g {os.getgid()}"),
            ("/srv/geb", str(folder)),
        ):
            text = re.sub(pattern, here, text)
        script = f'geb() {{ {forked_python()} -m flows.commands.cli "$@"; }}\n{text}'
        request = "Please bring two cups to room 12.\n"
        done = run_program("bash", "-ec", script, cwd=folder, env=environment, input=request)
        assert done.returncode == 0, f"{page}: {command}\n{text}\n{done.stdout}{done.stderr}"
