"""A file of the user's: its digest must cover all that it is."""

from pathlib import Path

import pytest

from stages.contract.errors import UserError
from stages.harness.user_code import load_function

IMPORTS = "from {name} import weight\n\ndef score():\n    return weight()\n"


@pytest.mark.parametrize("before", ["", "import sys\nsys.path.insert(0, {folder!r})\n"])
def test_file_beside_it_is_refused(tmp_path: Path, before: str) -> None:
    name = f"helper_{len(before)}"
    (tmp_path / f"{name}.py").write_text("def weight():\n    return 1.0\n")
    code = tmp_path / "oracle.py"
    code.write_text(before.format(folder=str(tmp_path)) + IMPORTS.format(name=name))
    with pytest.raises(UserError, match=name) as caught:
        load_function(code, "score", setting="score.python.function", signature="() -> float")
    assert "put the code of other files into this one" in caught.value.remedy


def test_installed_packages_are_imported(tmp_path: Path) -> None:
    code = tmp_path / "oracle.py"
    code.write_text("import colorsys\nfrom statistics import mean\n\ndef score():\n    return 1\n")
    score = load_function(code, "score", setting="score.python.function", signature="() -> float")
    assert score() == 1
