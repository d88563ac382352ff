"""Prepare: sources in, ``iteration-<t>.parquet`` and ``test.parquet`` out.

Two passes over the sources. The first keeps 40 bytes a row: digests of the prompt, alone and with
its answer, and its source. From them :mod:`stages.prepare.split` decides where each row goes. The
second writes. Texts are never held, so that memory hardly grows with the number of prompts. Rows
keep their source's order.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from stages.contract.digests import prompt_id
from stages.contract.errors import UserError, located
from stages.contract.messages import CARRIERS
from stages.harness.context import FoundInput, StageContext
from stages.harness.program import Stage
from stages.modeling.sources import RowSource, open_source
from stages.prepare.params import PrepareParams
from stages.prepare.prompts import Prompt, read_prompt
from stages.prepare.split import TEST, Split, as_ids, split
from stages.tables.schemas import PROMPTS, TableWriter

# Rows are held for each part at once: a smaller group than elsewhere keeps long prompts bounded.
_ROWS_PER_GROUP = 1024
_TEST_SOURCE = 0
# Counts that a person should look at.
_TOLD = (
    "duplicates",
    "other_reference_answers",
    "overlap_with_test",
    "invalid_rows",
    "assistant_turns_cut",
)
_Sources = list[tuple[int, RowSource]]
"""Sources in reading order, each with its label for :func:`stages.prepare.split.split`."""


@dataclass
class _Scan:
    """Rows of the first pass: one entry per usable row, in reading order."""

    identities: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)
    """Identities of the prompts together with their reference answers."""
    labels: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def run(ctx: StageContext[PrepareParams]) -> None:
    """Splits the prompts of the ``train`` sources and of the optional ``test`` source."""
    sources = _open_sources(ctx)
    total = 2 * sum(source.num_rows for _, source in sources)
    scan = _scan(ctx, sources, total)
    decided = split(
        as_ids(scan.identities),
        np.array(scan.labels, dtype=np.int32),
        iterations=ctx.params.iterations,
        test_prompts=ctx.params.test_prompts,
        prompts_per_iteration=ctx.params.prompts_per_iteration,
        seed=ctx.request.seed,
        overlap_stays_in_train=ctx.params.overlap == "drop_from_test",
    )
    _write(ctx, sources, scan, decided, total)
    report = _report(scan, decided)
    ctx.write_json("metrics.json", report)
    for name in _TOLD:
        if report[name]:
            ctx.events.info(f"{name.replace('_', ' ')}: {report[name]}")


def _open_sources(ctx: StageContext[PrepareParams]) -> _Sources:
    params = ctx.params
    train = ctx.inputs.get("train", ())
    test = ctx.inputs.get("test", ())
    columns = (
        *CARRIERS,
        params.messages_column,
        params.prompt_column,
        "chosen",
        params.reference_column,
        params.reference_column.partition(".")[0],
        *params.reference_columns,
    )

    def opened(given: FoundInput, split: str) -> RowSource:
        return open_source(
            given, subset=params.subset, split=split, hub_file=params.hub_file, columns=columns
        )

    sources = [(number, opened(source, params.split)) for number, source in enumerate(train, 1)]
    for source in test:
        sources.append((_TEST_SOURCE, opened(source, params.test_split)))
    return sources


def _prompts(params: PrepareParams, source: RowSource) -> Iterator[tuple[Prompt | None, bytes]]:
    """The prompts of a source with their identities; None for an invalid row to drop."""
    for place, row in source.read():
        try:
            with located(place):
                prompt = read_prompt(row, params, source.columns)
            yield prompt, bytes.fromhex(prompt_id(prompt.messages))
        except UserError:
            if params.invalid_rows == "refuse":
                raise
            yield None, b""


def _scan(ctx: StageContext[PrepareParams], sources: _Sources, total: int) -> _Scan:
    scan = _Scan()
    for label, source in sources:
        before = len(scan.labels)
        for prompt, identity in _prompts(ctx.params, source):
            scan.counts["rows"] += 1
            if prompt is None:
                scan.counts["invalid_rows"] += 1
            else:
                scan.identities += identity
                answered = identity + str(prompt.reference).encode()
                scan.answered += hashlib.blake2b(answered, digest_size=16).digest()
                scan.labels.append(label)
                scan.counts["assistant_turns_cut"] += prompt.cut
            if scan.counts["rows"] < total:
                ctx.events.progress(scan.counts["rows"], total, "rows", "reading")
        if len(scan.labels) == before:
            raise UserError(
                f"{source.name} holds no prompts",
                "check that it is the right file, data set, split and column",
            )
    return scan


def _write(
    ctx: StageContext[PrepareParams],
    sources: _Sources,
    scan: _Scan,
    decided: Split,
    total: int,
) -> None:
    names = {TEST: "test.parquet"} | {
        t: f"iteration-{t}.parquet" for t in range(1, ctx.params.iterations + 1)
    }
    with ExitStack() as stack:
        writers = {
            part: stack.enter_context(TableWriter(ctx.out / name, PROMPTS, _ROWS_PER_GROUP))
            for part, name in names.items()
        }
        row = 0
        for _, source in sources:
            for prompt, identity in _prompts(ctx.params, source):
                if prompt is None:
                    continue
                if scan.identities[16 * row : 16 * row + 16] != identity:
                    raise OSError(f"{source.name} changed while it was read")
                writer = writers.get(int(decided.part[row]))
                if writer is not None:
                    writer.write(
                        {
                            "prompt_id": identity.hex(),
                            "messages": prompt.messages,
                            "reference_answer": prompt.reference,
                        }
                    )
                row += 1
                done = min(scan.counts["rows"] + row, total - 1)
                ctx.events.progress(done, total, "rows")
    ctx.events.progress(total, total, "rows")


def _distinct(identities: bytearray) -> int:
    return len(np.unique(as_ids(identities)))


def _report(scan: _Scan, decided: Split) -> dict[str, int]:
    return {
        **{name: scan.counts[name] for name in ("rows", "invalid_rows", "assistant_turns_cut")},
        "duplicates": decided.duplicates,
        # Rows that repeat a prompt with another answer. The first row's answer is used.
        "other_reference_answers": _distinct(scan.answered) - _distinct(scan.identities),
        "overlap_with_test": decided.overlap,
    }


STAGE = Stage(PrepareParams, run)
