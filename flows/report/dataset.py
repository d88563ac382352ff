"""A run's responses, scores and pairs as one folder that `datasets.load_dataset` reads.

Pairs are in TRL's preference format, conversational, with the prompt in a column of its own.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from flows.execution.run_record import RunRecord
from flows.report.files import new_folder, render, write_file
from flows.report.summary import Summary, summarise
from stages.contract.errors import UserError
from stages.tables.join import read_scored
from stages.tables.schemas import PAIRS, TableWriter, read_rows

_OF_SIDE = ("response", "score")
_OF_RESPONSE = ("prompt_id", "sample_index", "reference_answer", "response", "finish_reason")
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
TABLES: Mapping[str, pa.Schema] = {
    "pairs": pa.schema(
        {
            "prompt_id": pa.string(),
            "prompt": _MESSAGES,
            "chosen": _MESSAGES,
            "rejected": _MESSAGES,
            "score_chosen": pa.float64(),
            "score_rejected": pa.float64(),
            "iteration": pa.int32(),
        }
    ),
    "responses": pa.schema(
        {
            "prompt_id": pa.string(),
            "sample_index": pa.int32(),
            "prompt": _MESSAGES,
            "reference_answer": pa.string(),
            "response": pa.string(),
            "finish_reason": pa.string(),
            "num_tokens": pa.int32(),
            "logprob": pa.float64(),
            "score": pa.float64(),
            # A JSON object: the library knows no maps.
            "components": pa.string(),
            "iteration": pa.int32(),
        }
    ),
}


def export(record: RunRecord, folder: Path) -> dict[str, int]:
    """Writes the data set into a new folder.

    Returns:
        Rows by table.

    Raises:
        UserError: The run has no pairs yet, the folder holds something, or the disk is full.
    """
    summary = summarise(record)
    iterations = range(1, summary.config.iterations + 1)
    done = [t for t in iterations if f"iteration-{t}/pair" in summary.artifacts]
    if not done:
        raise UserError(
            f"run {record.name!r} has no pairs yet",
            "wait for the `pair` step of its first iteration, or resume the run",
        )
    rows = {"pairs": _pairs, "responses": _responses}
    counts = dict.fromkeys(TABLES, 0)
    with new_folder(folder):
        (folder / "data").mkdir(parents=True)
        for table, schema in TABLES.items():
            for t in done:
                path = folder / "data" / f"{table}-iteration-{t}.parquet"
                with TableWriter(path, schema) as writer:
                    for row in rows[table](summary, t):
                        writer.write({**row, "iteration": t})
                counts[table] += writer.num_rows
                if not writer.num_rows:
                    # Pairs from outside have no samples.
                    path.unlink()
        counts = {table: number for table, number in counts.items() if number}
        card = render("dataset_card.md.jinja", run=summary, counts=counts, iterations=len(done))
        write_file(folder / "README.md", card)
    return counts


def _pairs(summary: Summary, iteration: int) -> Iterator[dict[str, Any]]:
    """Pairs of an iteration; TRL has no ties, which so are left out."""
    path = summary.artifacts[f"iteration-{iteration}/pair"].file("pairs.parquet")
    sides = ("chosen", "rejected")
    names = ["prompt_id", "messages", "tie", *(f"{s}_{n}" for s in sides for n in _OF_SIDE)]
    for row in read_rows(path, PAIRS, columns=names):
        if not row["tie"]:
            yield {
                "prompt_id": row["prompt_id"],
                "prompt": row["messages"],
                **{
                    side: [{"role": "assistant", "content": row[f"{side}_response"]}]
                    for side in sides
                },
                **{f"score_{side}": row[f"{side}_score"] for side in sides},
            }


def _responses(summary: Summary, iteration: int) -> Iterator[dict[str, Any]]:
    tables = summary.scored(f"iteration-{iteration}", summary.config.generate.num_shards)
    for batch in read_scored(*tables, score_columns=("components",)):
        pairs = zip(batch.responses.to_pylist(), batch.scored.to_pylist(), strict=True)
        for response, scored in pairs:
            yield {
                "prompt": response["messages"],
                "num_tokens": len(response["response_logprobs"]),
                "logprob": sum(response["response_logprobs"]),
                "score": scored["score"],
                "components": json.dumps(dict(scored["components"] or ())),
                **{name: response[name] for name in _OF_RESPONSE},
            }
