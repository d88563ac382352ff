"""A file of the user's: its digest must cover all that it is."""

import pytest

from stages.contract.errors import UserError
from stages.harness.user_code import UserFunction


class Score(UserFunction):
    noun = "oracle"
    section = "score.python"
    signature = "() -> float"
    remedy = "fix it"


IMPORTS = "from {name} import weight\n\ndef score():\n    return weight()\n"


@pytest.mark.parametrize("before", ["", "import sys\nsys.path.insert(0, {folder!r})\n"])
def test_file_beside_it_is_refused(tmp_path, before):
    name = f"helper_{len(before)}"
    (tmp_path / f"{name}.py").write_text("def weight():\n    return 1.0\n")
    code = tmp_path / "oracle.py"
    code.write_text(before.format(folder=str(tmp_path)) + IMPORTS.format(name=name))
    with pytest.raises(UserError, match=name) as caught:
        Score(code, "score")
    assert "put the code of other files into this one" in caught.value.remedy


def test_installed_packages_are_imported(tmp_path):
    code = tmp_path / "oracle.py"
    code.write_text("import colorsys\nfrom statistics import mean\n\ndef score():\n    return 1\n")
    assert Score(code, "score").call() == 1
