"""Settings, oracles, configuration files and commands with mistakes that a person makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bad_inputs.trial import Case
from flows.pipeline.fields import run_rows
from stages.contract.errors import EXIT_FAILED, EXIT_USER

_CONFIG = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
# Values that a kind of field excludes, by the beginning of its declaration.
_EXCLUDED = {
    "integer": ["nope", "1.5", "[]", "{}", ".nan", '"a\\0b"'],
    "number": ["nope", "[]", "{}", ".nan", ".inf"],
    "text": ["[1]", "{a: 1}", '"a\\0b"'],
    "true": ["nope", "3", "[]"],
    "list of": ["{a: 1}"],
    "names and values": ["nope", "[1]"],
    "section": ["nope", "[1]"],
}
_CHOICE = ["nope", "-1.5e300", "{a: 1}"]
_BOUND = re.compile(r"([<>≤≥]) (-?[\d.e+-]+\d|\d)")
# A file system may be there when the command is tried again.
_MAY_COME_BACK = "/proc/x"
_ORACLES = {
    "raises": "def score(p, r, a):\n    raise ValueError('no')",
    "too few": "def score(p, r, a):\n    return [1.0]",
    "text": "def score(p, r, a):\n    return ['good'] * len(r)",
    "nan": "def score(p, r, a):\n    return [float('nan')] * len(r)",
    "infinite": "def score(p, r, a):\n    return [float('inf')] * len(r)",
    "nothing": "def score(p, r, a):\n    pass",
    "a number": "def score(p, r, a):\n    return 1.0",
    "ends the process": "import os\ndef score(p, r, a):\n    os._exit(0)",
    "sys.exit": "import sys\ndef score(p, r, a):\n    sys.exit(0)",
    "exits on import": "raise SystemExit(0)",
    "another name": "def reward(p, r, a):\n    return [1.0] * len(r)",
    "no function": "score = 3",
    "too few arguments": "def score(p):\n    return [1.0]",
    "syntax": "def score(:",
    "missing import": "import not_a_module\ndef score(p, r, a):\n    return [1.0] * len(r)",
    "empty file": "",
    "megabytes": "def score(p, r, a):\n    raise ValueError('x' * 5_000_000)",
    "escapes": "def score(p, r, a):\n    raise ValueError('\\x1b[2J')",
    "a class": "class score:\n    pass",
    "a generator that ends": "def score(p, r, a):\n    yield 1.0",
}
_CONFIGS = {
    "empty list": "[]",
    "no YAML": "{",
    "a tab": "a:\n\tb: 1",
    "the same key twice": "seed: 1\nseed: 2",
    "a tag": "seed: !!python/object:os.system x",
    "extends itself": "extends: config.yaml",
    "extends nothing": "extends: missing.yaml",
    "extends a folder": "extends: .",
    "extends no YAML": "extends: /etc/passwd",
    "an unknown key": "sed: 1",
    "many unknown keys": "\n".join(f"key{number}: 1" for number in range(3000)),
    "aliases": "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "a text": "hello",
    "binary": "\0\1\2",
    "a huge number": "seed: " + "9" * 5000,
    "deep": "inputs: " + "[" * 2000,
}
_COMMANDS = [
    *(f"{command} nothing-there" for command in ("resume", "report", "status", "logs")),
    *(f"{command} nothing-there" for command in ("promote", "rollback")),
    "compare a",
    "compare a b",
    "export nothing-there out",
    "evaluate",
    "report ../x",
    "promote q:",
    "promote q:0",
    "promote q:-1",
    f"promote q:{'9' * 5000}",
    "promote q@",
    "up --port 99999",
    "up --port nope",
    "up --limit 0",
    "up --database nope://x",
    "run",
    "plan missing.yaml",
    "plan /dev/null",
    "plan /proc",
    "run . ",
    "nope",
    "--nope",
    *(f"plan {_CONFIG} --set {text}" for text in ("a", "=", "kappa=1", "train.kapa=1", "train=1")),
    *(f"plan {_CONFIG} --set {text}" for text in ("train.kappa", "a.b.c=1", "seed=[", "=1", ".=1")),
    *(f"plan {_CONFIG} --store {place}" for place in ("/dev/null", "/proc/x", "s3://", "nope://x")),
    f"plan {_CONFIG} --runner nope",
    f"plan {_CONFIG} --from nope",
    *(f"sweep {_CONFIG} --grid {text} --seeds 0" for text in ("a", "seed=", "train.kapa=1", "=1")),
    *(f"sweep {_CONFIG} --grid train.kappa=1 --seeds {text}" for text in ("x", "0,0", "-1", "")),
    f"sweep {_CONFIG} {_CONFIG}",
    "fields nope",
    "init",
    "init /proc/x",
    "verify --store missing",
    "gc x",
    "fetch nope",
    "bandit missing",
    "models x",
]


def cases(folder: Path) -> Iterator[Case]:
    """All cases; the files that they name are written to a folder."""
    plan = ["plan", _CONFIG, "--store", str(folder / "store")]
    for row in run_rows():
        setting = row.name.replace("STAGE", "train").replace("NAME", "x")
        for value in excluded(row.kind):
            name = f"{setting}={value}"
            yield Case("settings", name, [*plan, "--set", name])
    for name, text in _ORACLES.items():
        code = folder / f"{name.replace(' ', '_')}.py"
        code.write_text(text)
        oracle = {"score.oracle": "python", "inputs.oracle_code": code}
        given = [f"--set={key}={value}" for key, value in oracle.items()]
        yield Case("oracles", name, [*plan, *given, "--set=score.python.function=score"])
    for name, text in _CONFIGS.items():
        place = folder / name.replace(" ", "_") / "config.yaml"
        place.parent.mkdir()
        place.write_text(text)
        yield Case("configuration files", name, ["plan", str(place)])
    for command in _COMMANDS:
        code = EXIT_FAILED if command.endswith(_MAY_COME_BACK) else EXIT_USER
        yield Case("commands", command, command.split(" "), code=code)


def excluded(kind: str) -> list[str]:
    """Values that a field's declared kind excludes, as text for ``--set``."""
    parts = kind.replace(" or null", "").split(", ")
    excluded = next(
        (value for start, value in _EXCLUDED.items() if parts[0].startswith(start)), _CHOICE
    )
    if parts[0].startswith("number") or " or number" in kind:
        excluded = _EXCLUDED["number"]
    beyond = []
    for relation, bound in _BOUND.findall(kind):
        step = {"<": 0.0, ">": 0.0, "≤": 1.0, "≥": -1.0}[relation]
        beyond.append(f"{float(bound) + step:g}")
    return [*excluded, *beyond]
