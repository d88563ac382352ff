"""Changes that other settings would make to a finished run, told from its artifacts alone.

Stored samples are paired again, and the objective of the pairs is evaluated at the first step of
each iteration. After the first iteration a run with other settings would sample from another
policy: what is said of later ones holds for the stored samples.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.execution.plan import differences
from flows.execution.plan import plan as planned
from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.external import inputs_resolved_once, run_helper
from flows.pipeline.placement import Execution
from flows.planning.estimate import estimate
from flows.planning.show import summary_line
from flows.report.summary import summarise
from flows.report.table import FittedTable
from flows.runners.choose import make_runner
from flows.runners.local.environment import stage_environment
from stages.contract.digests import digest_of
from stages.contract.errors import UserError
from stages.contract.request import FileInput, make_request
from stages.store.base import Artifact, Store
from stages.tables.schemas import PAIRS, read_rows

# Sections whose settings change what is sampled, so that the stored samples are not the run's.
_SECTIONS = [*RunConfig.model_fields]
_SAMPLING = ("seed", *_SECTIONS[_SECTIONS.index("inputs") : _SECTIONS.index("score")])
_SHOWN_PAIRS = 3
_SIDES = ("chosen", "rejected")
_Texts = tuple[str, str, str]
_FIGURES = (
    ("κ", "kappa", ".4g"),
    ("loss", "loss", ".3f"),
    ("bonus ratio", "bonus_ratio", ".3g"),
    ("bonus gradient", "bonus_gradient", ".3g"),
    ("its share", "bonus_gradient_share", ".3g"),
)
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Iteration:
    """One iteration under the run's settings and under the others.

    Attributes:
        pairs: Pairs before and after.
        changed: Prompts whose pairs change.
        gone: Some pairs that would not be: prompt, chosen and rejected response.
        new: Some that would be.
        figures: Metrics of the objective at the first step, before and after.
    """

    iteration: int
    pairs: tuple[int, int]
    ties: tuple[int, int]
    changed: int
    gone: list[_Texts]
    new: list[_Texts]
    figures: tuple[Metrics, Metrics]


@dataclass(frozen=True)
class WhatIf:
    """A run under other settings.

    Attributes:
        reused: Steps that the store has already.
        computed: Steps that would be computed.
        cautions: Limits of what is said.
    """

    run: str
    changes: list[str]
    iterations: list[Iteration]
    reused: int
    computed: int
    cost: str
    cautions: list[str]

    def title(self) -> str:
        """The question."""
        return f"What if {self.run} had {'; '.join(self.changes) or 'no other settings'}?"

    def plan_line(self) -> str:
        """The steps to compute, and what they would cost."""
        total = self.reused + self.computed
        return f"{self.computed} of {total} steps would be computed; {self.cost}"

    def table(self) -> FittedTable:
        """A row for each iteration; ``before → after`` where they differ."""
        header = ("iteration", "pairs", "ties", "changed", *(title for title, *_ in _FIGURES))
        rows = []
        for each in self.iterations:
            counts = [_shown(*values, "d") for values in (each.pairs, each.ties)]
            before, after = each.figures
            figures = [_shown(before[name], after[name], form) for _, name, form in _FIGURES]
            rows.append([str(each.iteration), *counts, str(each.changed), *figures])
        return FittedTable("", header, rows, kept=4)


def _shown(before: float, after: float, form: str) -> str:
    texts = format(before, form), format(after, form)
    return texts[0] if texts[0] == texts[1] else " → ".join(texts)


def what_if(record: RunRecord, config: RunConfig, asked: RunConfig) -> WhatIf:
    """Compares a run with itself under other settings; UserError if no iteration of it is whole."""
    before, after = config.to_values(), asked.to_values()
    artifacts = summarise(record).artifacts
    whole = [t for t in range(1, config.iterations + 1) if f"iteration-{t}/train" in artifacts]
    if not whole:
        raise UserError(
            f"run {record.name} has trained no iteration yet", "resume it, then ask again"
        )
    with inputs_resolved_once():
        lines = planned(asked)
        cost = summary_line(estimate(asked, lines))
    counts = Counter(each.action for each in lines)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tables = {t: _pairs(scratch, artifacts, t, config, asked) for t in whole}
        figures = _figures(scratch, artifacts, tables, config, asked)
        iterations = [
            _iteration(t, both, found)
            for (t, both), found in zip(tables.items(), figures, strict=True)
        ]
    changes = list(differences(before, after))
    cautions = list(_cautions(before, after, config, asked))
    totals = counts["reuse"], counts["run"]
    return WhatIf(record.name, changes, iterations, *totals, cost, cautions)


def _needed(artifacts: Mapping[str, Artifact], step: str) -> Artifact:
    if step not in artifacts:
        raise UserError(f"the store has no result of {step}", "resume the run, then ask again")
    return artifacts[step]


def _cautions(
    before: Mapping[str, Any], after: Mapping[str, Any], config: RunConfig, asked: RunConfig
) -> Iterator[str]:
    others = [name for name in _SAMPLING if before[name] != after[name]]
    if others:
        yield f"{', '.join(others)}: samples would be others; the stored ones are compared"
    if config.score.result_fields() != asked.score.result_fields():
        yield "score: the oracle would be asked again; the stored scores are compared"
    if config.iterations > 1:
        yield "after iteration 1 the samples would come from another policy"
    if config.inputs.preferences:
        yield "the pairs are those of inputs.preferences, whatever `pair` says"
    if "accumulate" in (config.pair_data, asked.pair_data):
        yield "pair_data accumulate: the figures are those of an iteration's own pairs"
    if asked.train.target_ratio is not None:
        yield "κ is calibrated on all pairs here, on the first batches in a training"


def _pairs(
    scratch: Path, artifacts: Mapping[str, Artifact], t: int, config: RunConfig, asked: RunConfig
) -> tuple[Path, Path]:
    """Tables of pairs of an iteration, as the run made it and as the other settings would."""
    own = _needed(artifacts, f"iteration-{t}/pair")
    path = own.file("pairs.parquet")
    code = asked.inputs.strategy_code if asked.pair.strategy == "python" else None
    if config.inputs.preferences or (config.pair == asked.pair and code is None):
        return path, path
    inputs: dict[str, list[FileInput]] = {"responses": [], "scores": []}
    for shard in range(config.generate.num_shards):
        scores = _needed(artifacts, f"iteration-{t}/score/{shard}").file("scores.parquet")
        generated = _needed(artifacts, f"iteration-{t}/generate/{shard}")
        responses = generated.file("responses.parquet")
        for name, each in (("responses", responses), ("scores", scores)):
            inputs[name].append(FileInput(location=str(each), digest=digest_of(each)))
    if code is not None:
        inputs["code"] = [FileInput(location=code, digest=digest_of(Path(code)))]
    store = Store.open(str(scratch / "store"), create=True)
    seed, place = own.manifest.seed, f"iteration-{t}/pair"
    request = make_request(asked.pair, inputs=inputs, seed=seed, store=store.location, step=place)
    runner = make_runner(Execution(interpreters=asked.execution.interpreters))
    try:
        runner.run(request, lambda event: None)
    finally:
        runner.stop_all()
    made = store.load("pair", request.key)
    assert made is not None
    return path, made.file("pairs.parquet")


def _figures(
    scratch: Path,
    artifacts: Mapping[str, Artifact],
    tables: Mapping[int, tuple[Path, Path]],
    config: RunConfig,
    asked: RunConfig,
) -> list[tuple[Metrics, Metrics]]:
    """Evaluates the objective in the environment of the train stage."""
    cases = []
    for t, paths in tables.items():
        reference = artifacts[f"iteration-{t}/train"].file("reference_logprobs.parquet")
        earlier = range(1, t) if config.pair_data == "accumulate" else ()
        before = (_needed(artifacts, f"iteration-{each}/pair") for each in earlier)
        first = sum(each.manifest.files["pairs.parquet"].rows or 0 for each in before)
        both = []
        for path, each in zip(paths, (config, asked), strict=True):
            params = each.train.model_copy(update={"iteration": t}).model_dump(mode="json")
            # In the first iteration every reference is the base.
            is_stored = t == 1 or each.train.reference == config.train.reference
            known = {"pairs": [str(path)], "params": params, "first_pair": first}
            known["reference"] = str(reference) if is_stored else ""
            both.append(known | {"code": each.inputs.objective_code})
        cases.append(both)
    question, answer = scratch / "asked.json", scratch / "found.json"
    question.write_text(json.dumps({"cases": cases}))
    interpreter = asked.execution.interpreters.get("train", sys.executable)
    program = ["stages.train.what_if", str(question), str(answer)]
    environment = stage_environment(in_bucket=False)
    run_helper(interpreter, program, "the evaluation of the objective", environment)
    return [(before, after) for before, after in json.loads(answer.read_text())]


def _iteration(t: int, paths: tuple[Path, Path], figures: tuple[Metrics, Metrics]) -> Iteration:
    before, after = map(_read, paths)
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    return Iteration(
        iteration=t,
        pairs=(len(before), len(after)),
        ties=(sum(tie for *_, tie in before), sum(tie for *_, tie in after)),
        changed=len({prompt for prompt, *_ in gone | new}),
        gone=[texts for name, texts in before.items() if name in gone][:_SHOWN_PAIRS],
        new=[texts for name, texts in after.items() if name in new][:_SHOWN_PAIRS],
        figures=figures,
    )


def _read(path: Path) -> dict[tuple[str, int, int, bool], _Texts]:
    """Texts of each pair by prompt, both samples and whether they tie."""
    columns = ["prompt_id", "messages", "tie"]
    columns += [f"{side}_{name}" for side in _SIDES for name in ("sample_index", "response")]
    return {
        (row["prompt_id"], *(row[f"{side}_sample_index"] for side in _SIDES), row["tie"]): (
            row["messages"][-1]["content"],
            row["chosen_response"],
            row["rejected_response"],
        )
        for row in read_rows(path, PAIRS, columns=columns)
    }
