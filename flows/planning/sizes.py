"""Numbers of prompts and samples: from artifacts that exist, else as configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flows.pipeline.config import RunConfig
from flows.pipeline.step import Source, Step
from flows.planning import sizes
from stages.contract.data_files import count_rows, files_of_folder
from stages.contract.errors import UserError
from stages.contract.request import FileInput
from stages.contract.store import Artifact

_BYTES_PER_TOKEN = 4
# Of a prompt of UltraFeedback, about.
_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Table:
    """Rows of a table; of responses also their mean length and the number of their prompts."""

    rows: float
    response_tokens: float = 0.0
    prompts: float = 0.0


@dataclass(frozen=True)
class Rows:
    """Rows of a data file outside the store.

    Attributes:
        number: Rows.
        tokens: Mean length, at four bytes a token.
    """

    number: int
    tokens: float


def rows_of(sources: Sequence[Source]) -> Rows | None:
    """Rows of local data files and folders; None where one of them is elsewhere or no table."""
    counted = [_count(Path(each.location)) for each in sources if isinstance(each, FileInput)]
    known = [each for each in counted if each is not None]
    if not sources or len(known) < len(sources):
        return None
    number = sum(rows for rows, _ in known)
    return Rows(number, sum(size for _, size in known) / max(number, 1) / _BYTES_PER_TOKEN)


def train_prompts(config: RunConfig, data: Rows | None) -> float | None:
    """Prompts of one iteration; None where nothing tells their number."""
    part = config.prepare.prompts_per_iteration
    assumed = config.estimation.prompts_per_iteration
    if data is None:
        return assumed or part
    held_out = 0 if config.inputs.test_prompts else config.prepare.test_prompts
    here = max(data.number - held_out, 0) / config.iterations
    return min(here, part) if part else here


def prompt_tokens(config: RunConfig, data: Rows | None) -> float:
    """Mean length of a prompt."""
    longest = config.generate.max_length_tokens
    mean = config.estimation.prompt_tokens or (data.tokens if data else _PROMPT_TOKENS)
    return min(mean, longest) if longest else mean


def held_out_prompts(config: RunConfig, data: Rows | None) -> float:
    """Held-out prompts: those of a file of their own, else as many as `prepare` holds out."""
    if config.inputs.test_prompts:
        if data is not None:
            return data.number
        return config.estimation.test_prompts or config.prepare.test_prompts
    return config.prepare.test_prompts


def made_rows(artifact: Artifact, path: str) -> int:
    """Rows of a table of an artifact."""
    return pq.read_metadata(artifact.file(path)).num_rows


def made_responses(artifact: Artifact) -> Table:
    """Responses of a finished `generate`."""
    metrics = artifact.read_json("metrics.json")
    answered = metrics["prompts"] - metrics["prompts_dropped_too_long"]
    return Table(metrics["responses"], metrics["mean_response_tokens"] or 0.0, answered)


def _count(path: Path) -> tuple[int, int] | None:
    """Rows and bytes of a file of prompts or conversations, or of a folder of them."""
    if path.is_dir():
        counted = [_count(each) for each in files_of_folder(path)]
        known = [each for each in counted if each is not None]
        if not known or len(known) < len(counted):
            return None
        return sum(rows for rows, _ in known), sum(size for _, size in known)
    if not path.is_file():
        return None
    if path.suffix == ".json":
        try:
            return count_rows(path), path.stat().st_size
        except UserError:
            # `prepare` says what is wrong with it.
            return None
    if path.suffix == ".parquet":
        try:
            metadata = pq.read_metadata(path)
        except (OSError, pa.ArrowInvalid):
            # `prepare` says what is wrong with it.
            return None
        groups = range(metadata.num_row_groups)
        return metadata.num_rows, sum(metadata.row_group(each).total_byte_size for each in groups)
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip()), path.stat().st_size


_TEST = "test.parquet"


@dataclass(frozen=True)
class Prepared:
    """Prompts of one step of `prepare`.

    Attributes:
        tables: Those of a run by their files; of a suite one, by the step.
        prompt_tokens: Mean length of a run's prompt; None of a suite.
        notes: Reasons why something could not be estimated.
    """

    tables: Mapping[str, Table]
    prompt_tokens: float | None = None
    notes: tuple[str, ...] = ()


def prepared(config: RunConfig, step: Step, made: Artifact | None) -> Prepared:
    """Prompts of a step.

    Args:
        config: The run's configuration.
        step: The step, of the run or of a suite.
        made: Its artifact, where the store has it.
    """
    if "train" not in step.inputs:
        return _of_suite(step, made)
    data = sizes.rows_of(step.inputs["train"])
    tokens = sizes.prompt_tokens(config, data)
    names = [f"iteration-{iteration}.parquet" for iteration in range(1, config.iterations + 1)]
    if made is not None:
        counted = {name: Table(sizes.made_rows(made, name)) for name in (*names, _TEST)}
        return Prepared(counted, tokens)
    number = sizes.train_prompts(config, data)
    own = sizes.rows_of(step.inputs.get("test", ()))
    tables = dict.fromkeys(names, Table(number or 0))
    tables[_TEST] = Table(sizes.held_out_prompts(config, own))
    unknown = (
        "the number of prompts is not known before `prepare` has read them: set "
        "estimation.prompts_per_iteration (or prepare.prompts_per_iteration)"
    )
    return Prepared(tables, tokens, () if number is not None else (unknown,))


def _of_suite(step: Step, made: Artifact | None) -> Prepared:
    """Prompts of a suite; their length is taken for that of the run's."""
    if made is not None:
        return Prepared({step.name: Table(sizes.made_rows(made, _TEST))})
    data = sizes.rows_of(step.inputs["test"])
    if data is not None:
        return Prepared({step.name: Table(data.number)})
    unread = f"the prompts of {step.name} are not on this machine: its suite is not estimated"
    return Prepared({step.name: Table(0)}, notes=(unread,))
