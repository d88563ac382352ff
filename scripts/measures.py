"""Measures what a reader has to understand, against the figures that the project has reached.

    python scripts/measures.py            # fails if a figure is above scripts/measures.json
    python scripts/measures.py --lower    # writes the figures of today, none of which may be higher
    python scripts/measures.py FILE...    # the places of these files, line by line

Code is counted in nodes of Python's syntax tree, room by room: denser lines do not lower it.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REACHED = Path(__file__).with_suffix(".json")
CODE = ("flows", "stages", "experiments", "examples")
# Prose that is generated, or a record of the past.
UNREAD = ("results/", "data/", "CHANGELOG.md", "scripts/measures.py")
SHORTEST_MESSAGE = 16
LONGEST_TEST_NAME = 64

PATTERNS = {
    "is no NOUN": r"\b(?:is|are|was|were|be) no (?!longer\b|more\b|less\b|fewer\b|better\b)[a-z]",
    "of one's own": r"\bof (?:one's|its|their|your|his|our) own\b",
    "that of": r"\b(?:those|that) (?:of|by|from|in|with|which)\b(?! (?:the )?same)",
    "those that": r"\bthose (?:that|which|who)\b",
    "What is": r"(?:^|[.!?;:] )What (?:is|are|was|were)\b(?![^.!?]*\?)",
    "says of": r"\b(?:told|tells?|said|says|speaks?) (?:of|so|by|which|apart)\b",
    "is told": r"\b(?:is|are|was|were|be) told\b",
    "taken for": r"\btaken? for\b",
    "stands for": r"\b(?:stands?|stood) (?:for|beside|in|by|there)\b",
    "beside": r"\bbeside\b",
    "but for": r"\bbut for\b|\bwant of\b|\bby now\b|\bever after\b|\bin silence\b",
    "so many": r"\bso many\b|\bso long as\b",
    "opens with Of": r"(?:^|[.!?] )(?:Of|With|In) (?:a|an|the|each|two|its|their)\b"
    r"(?! (?:case|meantime|first|end))",
    "made of it": r"\bmade of (?:it|them)\b|\bmakes? [a-z ]+ of (?:it|them)\b",
    "nobody": r"\bnobody\b|\bno one's\b",
}
COMPILED = {name: re.compile(pattern, re.MULTILINE) for name, pattern in PATTERNS.items()}
VAGUE = {"each", "found", "own", "said", "told", "asked", "wanted", "known", "made", "what"}
INVERTED_TEST = re.compile(r"_is_no_|_those_|_that_of_|_told|_s_own")


def main() -> int:
    """Compares, lowers or lists; exit code 1 if a figure has risen."""
    arguments = sys.argv[1:]
    places = [name for name in arguments if not name.startswith("--")]
    if places:
        for name in places:
            for line, fault in faults(name):
                print(f"{name}:{line}: {fault}")
        return 0
    figures = measure()
    reached = json.loads(REACHED.read_text(encoding="utf-8"))
    higher = [name for name in figures if figures[name] > reached.get(name, 0)]
    if figures["nodes"] <= reached["nodes"]:
        # Code that moves raises its new room, not the sum.
        higher = [name for name in higher if not name.startswith("nodes of ")]
    if "--lower" in arguments and not higher:
        REACHED.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for name in higher:
        print(f"{name}: {figures[name]}, which is above {reached.get(name, 0)}", file=sys.stderr)
    print(f"{figures['nodes']:,} nodes, {figures['nodes per line']} a line")
    return 1 if higher else 0


def measure() -> dict[str, float]:
    """Figures of the tracked files, which may only fall."""
    figures: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    lines = 0
    for name in tracked():
        kinds = Counter(fault.partition(":")[0] for _, fault in faults(name))
        if is_code(name):
            text = (ROOT / name).read_text(encoding="utf-8")
            lines += text.count("\n")
            rooms[room(name)] += sum(1 for _ in ast.walk(ast.parse(text)))
        else:
            kinds = Counter({kind: kinds[kind] for kind in kinds if kind in ("prose", "name")})
        figures.update(kinds)
    return {
        "nodes": sum(rooms.values()),
        "nodes per line": round(sum(rooms.values()) / lines, 2),
        "tuple assignments": figures["tuple assignment"],
        "star tuples": figures["star tuple"],
        "inverted sentences": figures["prose"],
        "vague names": figures["name"],
    } | {f"nodes of {name}": rooms[name] for name in sorted(rooms)}


def tracked() -> list[str]:
    """Python and Markdown files that people read, in git's order."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = dict.fromkeys(listed.stdout.split())
    return [name for name in names if not name.startswith(UNREAD) and (ROOT / name).exists()]


def is_code(name: str) -> bool:
    """True for the modules whose size counts: not tests, benchmarks or scripts."""
    return name.endswith(".py") and name.startswith(CODE) and "/tests/" not in name


def room(name: str) -> str:
    """The folder that a module belongs to, two levels deep."""
    parts = name.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def faults(name: str) -> Iterator[tuple[int, str]]:
    """Yields line and description of each place that a reader has to turn round."""
    text = (ROOT / name).read_text(encoding="utf-8")
    sentences = markdown_lines(text) if name.endswith(".md") else python_prose(text)
    for line, sentence in sentences:
        for pattern, compiled in COMPILED.items():
            if compiled.search(sentence):
                yield line, f"prose: {pattern}: {sentence[:90]}"
    if name.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            fault = code_fault(node)
            if fault:
                yield getattr(node, "lineno", 0), fault


def code_fault(node: ast.AST) -> str | None:
    """A form that saves a line, or a name that hides its noun."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            if not any(isinstance(value, ast.Starred) for value in values):
                swapped = {ast.unparse(t) for t in targets} & {ast.unparse(v) for v in values}
                return None if swapped else "tuple assignment"
        case ast.Starred(value=ast.Tuple()):
            return "star tuple"
        case ast.Name(id=name, ctx=ast.Store()) if name in VAGUE:
            return f"name: {name}"
        case ast.FunctionDef(name=name) if name.startswith("test_"):
            if len(name) > LONGEST_TEST_NAME or INVERTED_TEST.search(name):
                return f"name: {name}"
    return None


def markdown_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a page outside its blocks of code, without code and links."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line)


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields docstrings, messages and comments of a module, line by line."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(value)) if len(value) >= SHORTEST_MESSAGE and " " in value:
                for offset, line in enumerate(value.split("\n")):
                    yield node.lineno + offset, line.strip()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


if __name__ == "__main__":
    sys.exit(main())
