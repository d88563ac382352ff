"""The list of wrong changes that `make wirings` tries can be tried: each text stands once."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_wiring_names_one_place_and_existing_tests():
    listed = tomllib.loads((ROOT / "tests/wirings.toml").read_text(encoding="utf-8"))["wiring"]
    wrong = []
    for entry in listed:
        count = (ROOT / entry["file"]).read_text(encoding="utf-8").count(entry["old"])
        if count != 1:
            wrong.append(f"{entry['what']}: {entry['file']} has it {count} times")
        for test in entry["tests"]:
            path, _, name = test.partition("::")
            if not (ROOT / path).exists() or (name and name not in (ROOT / path).read_text()):
                wrong.append(f"{entry['what']}: no {test}")
    assert wrong == []
