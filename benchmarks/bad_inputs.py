"""Bad inputs to the command line, each of which must be refused with one message.

    python -m benchmarks.bad_inputs                  # --only TEXT: cases that have it, --json

Every setting gets values that its own declaration (`geb fields`) excludes, and commands, oracles
and files get mistakes that a person makes. A case is right if the exit code is 64, the message
names a remedy, no traceback is shown, and the message has at most 4,000 characters. Each case runs
in a fork of this process, so that none pays for the start of Python. Exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.commands import cli
from flows.pipeline.fields import run_rows
from stages.contract.errors import EXIT_FAILED, EXIT_USER

_CONFIG = str(Path(__file__).parents[1] / "configs/quickstart.yaml")
_LIMIT_SECONDS = 60
_MOST_CHARACTERS = 4000
_CRASHED = 99
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
    *(f"{command} nothing-there" for command in ("resume", "report", "status", "logs", "diff x")),
    *(f"{command} nothing-there" for command in ("lineage", "chat", "promote", "rollback")),
    *("compare a", "compare a b", "export nothing-there out", "evaluate", "report ../x"),
    *("promote q:", "promote q:0", "promote q:-1", f"promote q:{'9' * 5000}", "promote q@"),
    *("up --port 99999", "up --port nope", "up --limit 0", "up --database nope://x"),
    *("run", "plan missing.yaml", "plan /dev/null", "plan /proc", "run . ", "nope", "--nope"),
    *(f"plan {_CONFIG} --set {text}" for text in ("a", "=", "kappa=1", "train.kapa=1", "train=1")),
    *(f"plan {_CONFIG} --set {text}" for text in ("train.kappa", "a.b.c=1", "seed=[", "=1", ".=1")),
    *(f"plan {_CONFIG} --store {place}" for place in ("/dev/null", "/proc/x", "s3://", "nope://x")),
    *(f"plan {_CONFIG} --runner nope", f"plan {_CONFIG} --from nope", "gc --older-than nope"),
    *(f"plan {_CONFIG} --from train --iteration {number}" for number in ("0", "99", "x")),
    *(f"sweep {_CONFIG} --grid {text} --seeds 0" for text in ("a", "seed=", "train.kapa=1", "=1")),
    *(f"sweep {_CONFIG} --grid train.kappa=1 --seeds {text}" for text in ("x", "0,0", "-1", "")),
    *(
        "paper --scale nope",
        "fields nope",
        "init",
        "init /proc/x",
        "verify --store missing",
        "gc x",
    ),
    *("images build nope", "doctor --runner nope", "fetch nope", "bandit missing.yaml", "models x"),
]


# Places that end with exit code 1: a file system may be there when the command is tried again.
_MAY_COME_BACK = ("/proc/x",)


@dataclass(frozen=True)
class Outcome:
    """A case with its exit code and output.

    Attributes:
        kind: Kind of input.
        arguments: Arguments of ``geb``.
        code: Exit code, or minus the signal that ended it.
        output: What it printed, stdout and stderr together.
    """

    kind: str
    arguments: list[str]
    code: int
    output: str

    @property
    def is_right(self) -> bool:
        """True if one message with a remedy refused it, with the exit code of its kind."""
        said = self.output
        wanted = EXIT_FAILED if self.arguments[-1] in _MAY_COME_BACK else EXIT_USER
        is_told = "error " in said and "remedy" in said
        is_readable = len(said) <= _MOST_CHARACTERS and "\x1b[2J" not in said
        return self.code == wanted and is_told and is_readable and "Traceback" not in said


def cases(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Kinds and arguments of ``geb``; files that they name are written to a folder."""
    plan = ["plan", _CONFIG, "--store", str(folder / "store")]
    for row in run_rows():
        name = row.name.replace("STAGE", "train").replace("NAME", "x")
        for value in excluded(row.kind):
            yield "settings", [*plan, "--set", f"{name}={value}"]
    for name, text in _ORACLES.items():
        code = folder / f"{name.replace(' ', '_')}.py"
        code.write_text(text)
        oracle = {"score.oracle": "python", "inputs.oracle_code": code}
        given = [f"--set={key}={value}" for key, value in oracle.items()]
        yield "oracles", [*plan, *given, "--set=score.python.function=score"]
    for name, text in _CONFIGS.items():
        place = folder / name.replace(" ", "_") / "config.yaml"
        place.parent.mkdir()
        place.write_text(text)
        yield "configuration files", ["plan", str(place)]
    for command in _COMMANDS:
        yield "commands", command.split(" ")


def excluded(kind: str) -> list[str]:
    """Values that a field's declared kind excludes, as text for ``--set``."""
    parts = kind.replace(" or null", "").split(", ")
    found = next((each for start, each in _EXCLUDED.items() if parts[0].startswith(start)), _CHOICE)
    if parts[0].startswith("number") or " or number" in kind:
        found = _EXCLUDED["number"]
    beyond = []
    for relation, bound in _BOUND.findall(kind):
        step = {"<": 0.0, ">": 0.0, "≤": 1.0, "≥": -1.0}[relation]
        beyond.append(f"{float(bound) + step:g}")
    return [*found, *beyond]


def tried(kind: str, arguments: list[str]) -> Outcome:
    """Runs ``geb`` with the arguments in a fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        signal.alarm(_LIMIT_SECONDS)
        sys.argv = ["geb", *arguments]
        code = _CRASHED
        try:
            cli.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as stream:
        output = stream.read()
    return Outcome(
        kind, arguments, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.strip()
    )


def main() -> int:
    """Tries all cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose arguments have this text")
    parser.add_argument("--json", action="store_true", help="all outcomes as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["GEB_STORE"] = str(Path(name) / "store")
        os.chdir(name)
        control = tried("", ["plan", _CONFIG])
        if control.code != 0:
            raise SystemExit(f"a right configuration is refused:\n{control.output}")
        outcomes = [
            tried(kind, arguments)
            for kind, arguments in cases(Path(name))
            if asked.only in " ".join(arguments)
        ]
    wrong = [each for each in outcomes if not each.is_right]
    if asked.json:
        sys.stdout.write(json.dumps([asdict(each) for each in outcomes], indent=1))
        return int(bool(wrong))
    for each in wrong:
        sys.stdout.write(f"{each.code}  geb {' '.join(each.arguments)[-200:]}\n")
        sys.stdout.write(f"    {each.output[-300:]}\n")
    counts = Counter(each.kind for each in outcomes)
    of_them_wrong = Counter(each.kind for each in wrong)
    sys.stdout.write("\n| kind | tried | wrong |\n| --- | ---: | ---: |\n")
    for kind, number in counts.items():
        sys.stdout.write(f"| {kind} | {number} | {of_them_wrong[kind]} |\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
