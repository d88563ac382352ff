"""A file of the user's: its digest must cover all that it is."""

import sys

import pytest

from stages.contract.errors import UserError
from stages.harness.user_code import UserFunction


class Score(UserFunction):
    noun = "oracle"
    section = "score.python"
    signature = "() -> float"
    remedy = "fix it"


FOUND = "import sys\nsys.path.insert(0, {folder!r})\n"
LOADED = "from {module} import weight\n\ndef score():\n    return weight()\n"
CALLED = "def score():\n    from {module} import weight\n    return weight()\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls a function whose file imports the module ``place`` of a folder in its folder."""
    monkeypatch.setattr("sys.path", list(sys.path))
    before = set(sys.modules)

    def run(folder, place, code):
        helper = tmp_path / folder / place
        helper.parent.mkdir(parents=True)
        helper.write_text("def weight():\n    return 1.0\n")
        module = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        path = tmp_path / "code/oracle.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code.format(folder=str(tmp_path / folder), module=module))
        return Score(path, "score").call()

    yield run
    for name in sys.modules.keys() - before:
        del sys.modules[name]


@pytest.mark.parametrize("code", [LOADED, CALLED])
@pytest.mark.parametrize(
    ("folder", "place"),
    [
        ("code", "helper.py"),
        ("code/below", "helper.py"),
        ("code/below", "helper/__init__.py"),
        ("code/below", "helper/without_init.py"),
    ],
)
def test_modules_of_the_files_folder_are_refused(run, folder, place, code):
    with pytest.raises(UserError, match=r"imports helper.* from its own folder") as caught:
        run(folder, place, FOUND + code)
    assert "put the code of other files into this one" in caught.value.remedy


def test_a_file_beside_it_is_not_on_the_path(run):
    with pytest.raises(UserError, match=r"ModuleNotFoundError.*'helper'") as caught:
        run("code", "helper.py", LOADED)
    assert "put the code of other files into this one" in caught.value.remedy


@pytest.mark.parametrize(
    "folder",
    ["elsewhere", "code/.venv/any", "code/env/lib/python3.11", "code/env/site-packages"],
)
def test_environments_in_the_files_folder_are_allowed(run, folder):
    assert run(folder, "helper.py", FOUND + CALLED) == 1


def test_installed_packages_are_imported(tmp_path):
    code = tmp_path / "oracle.py"
    code.write_text("import colorsys\nfrom statistics import mean\n\ndef score():\n    return 1\n")
    assert Score(code, "score").call() == 1
