"""The flow `doubt`: an automatic sceptic on a registered model, whose verdict the registry keeps.

The model is sampled with another seed and, if there are any, on prompts that nothing has seen; the
oracle is asked what it gives for bad answers; suites say what was lost elsewhere. A check that
cannot be made is told and counts for nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from prefect.states import State

from flows.execution.cancellation import stage_flow
from flows.execution.prefect_tasks import StepTasks, step_tasks
from flows.execution.run_record import RunRecord, require_made_by, runs
from flows.execution.step_executor import StepExecutor
from flows.iterate import NOTHING, Overrides, Preset
from flows.pipeline.algorithm import sample_and_score
from flows.pipeline.config import RunConfig
from flows.pipeline.external import External, resolve
from flows.pipeline.inputs import resolve_inputs, resolve_model
from flows.pipeline.presets import DEFAULT_PRESET, configured
from flows.pipeline.step import Model, Source
from flows.pipeline.steps import Samples, Sampling, Steps, suite_place
from flows.report.prefect_artifacts import failed
from flows.report.rows import Paired, against_base, method_of
from flows.report.statistics import paired_difference
from flows.report.summary import last_iteration, summarise
from stages.contract.digests import derive_seed
from stages.contract.errors import GebError, UserError
from stages.store.base import Artifact
from stages.store.opening import open_store
from stages.store.registry import Doubt, DoubtCheck, ModelRegistry
from stages.tables.schemas import PROMPTS, RESPONSES, SCORES, read_rows, write_table

# Prompts whose answers are spoilt: each costs the oracle an answer for each way to spoil it.
_PROBED_PROMPTS = 64
_LONG = 10
BAD_ANSWERS = ("empty", "repeated", "prompt copied", "very long", "another prompt's answer")
"""Ways to spoil an answer, by which the oracle is probed."""


@stage_flow("doubt", "doubt of {model}")
def doubt(
    model: str,
    prompts: str = "",
    preset: Preset = DEFAULT_PRESET,
    config: Overrides = NOTHING,
) -> Doubt | State[Any]:
    """Tries to refute a registered model's gain, and keeps the verdict in the registry.

    Args:
        model: A registered model: `name`, `name@alias` or `name:version`.
        prompts: File or hub data set of prompts that nothing has seen; empty takes those that the
            run left over.
        preset: The configuration of the run that made it.
        config: What differs from the preset.
    """
    name = f"{preset}-doubt"
    try:
        asked = configured(preset, config)
        name = f"{asked.name}-doubt"
        return _doubt(asked.model_copy(update={"name": name}), model, prompts)
    except GebError as error:
        return failed(error, name)


def _doubt(config: RunConfig, model: str, prompts: str) -> Doubt:
    store = open_store(config.store)
    version = ModelRegistry(store).find(model)
    record = RunRecord.existing(store, version.run)
    require_made_by(record, version)
    with step_tasks(StepExecutor(config)) as tasks:
        sceptic = _Sceptic(config, tasks, record, f"{version.name}:{version.version}")
        checks = list(sceptic.checks(prompts))
    checks += _other_seeds(record)
    return ModelRegistry(store).record_doubt(version.name, version.version, checks)


class _Sceptic:
    """Steps and checks of one model.

    ``config`` is the configuration of the run that made it, under the name of the doubt.
    """

    def __init__(self, config: RunConfig, tasks: StepTasks, record: RunRecord, model: str) -> None:
        # Checks need rewards; log π_ref would cost a pass of the base.
        evaluate = config.evaluate.model_copy(update={"log_pi_ref": "off"})
        self._config = config.model_copy(update={"evaluate": evaluate})
        self._tasks = tasks
        self._external = resolve_inputs(config)
        self._steps = Steps(self._config, self._external)
        self._policy = Model(*resolve_model(model, record.store))
        self._base = Model(_start(record, self._external))
        self._folder = RunRecord(record.store, config.name).path

    def checks(self, prompts: str) -> Iterator[DoubtCheck]:
        """Submits all steps, then tells what they found."""
        # A wrong place of prompts is told before anything is sampled.
        known = self._candidates(prompts)
        test = self._tasks.submit(self._steps.prepare()).at("test.parquet")
        sampled = self._compare("other-seed", self._steps, test, self._sampling("seed"))
        for name, suite in self._config.suites.items():
            own = self._steps.of_suite(name)
            place = suite_place("doubt", name)
            if suite.prompts is None:
                # A second opinion of the same answers.
                self._compare(place, own, test, self._sampling("seed"), sampled)
                continue
            table = self._tasks.submit(own.prepare(f"{place}/prepare")).at("test.parquet")
            self._compare(place, own, table, own.for_evaluation())
        artifacts = self._tasks.wait()
        fresh = self._fresh(artifacts) if known else None
        if fresh is not None:
            self._compare("fresh", self._steps, fresh, self._sampling("fresh"))
        generated = (artifacts[f"other-seed/{each}/generate/0"] for each in ("policy", "base"))
        self._tasks.submit(self._probe(*self._spoil(*generated)))
        artifacts = self._tasks.wait()
        yield self._gain("another sampling seed", artifacts, "other-seed")
        if fresh is None:
            left = "the run left none over; name some with --prompts"
            said = f"the run has seen all of {prompts}" if prompts else left
            yield DoubtCheck(name="fresh prompts", passed=None, finding=said)
        else:
            yield self._gain("fresh prompts", artifacts, "fresh")
        yield from _probed(artifacts["bad-answers"].file("scores.parquet"))
        for name in self._config.suites:
            yield self._kept(name, artifacts)

    def _sampling(self, name: str) -> Sampling:
        seed = derive_seed(self._config.seed, "doubt", name)
        compares = self._config.score.compares
        return Sampling(self._config.evaluation_sampling(), seed, against_opponents=compares)

    def _compare(
        self,
        place: str,
        steps: Steps,
        prompts: Source,
        sampling: Sampling,
        sampled: tuple[Samples | None, Samples | None] = (None, None),
    ) -> tuple[Samples, Samples]:
        """Submits samples of base and policy, which it returns, their scores and the evaluation.

        With ``sampled``, samples of base and policy are scored once more in place of new ones.
        """
        take = partial(sample_and_score, steps, self._tasks.submit)
        base = take(f"{place}/base", sampling, self._base, prompts, None, sampled[0])
        own = take(f"{place}/policy", sampling, self._policy, prompts, base, sampled[1])
        self._tasks.submit(steps.evaluate(place, own, base, self._base))
        return base, own

    def _candidates(self, prompts: str) -> bool:
        """Submits the preparation of all prompts that may be fresh, if there are any."""
        sources = self._external["prompts"]
        if not prompts and len(sources) != 1:
            return False
        source = resolve(prompts, "dataset") if prompts else sources[0]
        split = self._config.prepare.model_copy(update={"test_split": self._config.prepare.split})
        config = self._config.model_copy(update={"iterations": 0, "prepare": split})
        external = {**self._external, "prompts": [], "test_prompts": [source]}
        self._tasks.submit(Steps(config, external).prepare("fresh/prepare"))
        return True

    def _fresh(self, artifacts: Mapping[str, Artifact]) -> External | None:
        """A table of the prompts that no part of the run has; None if there are none."""
        parts = artifacts["prepare"].manifest.files
        tables = [artifacts["prepare"].file(name) for name in parts if name.endswith(".parquet")]
        seen = {row["prompt_id"] for row in read_rows(tables, PROMPTS, columns=["prompt_id"])}
        every = artifacts["fresh/prepare"].file("test.parquet")
        fresh = [row for row in read_rows(every, PROMPTS) if row["prompt_id"] not in seen]
        if not fresh:
            return None
        return self._table("fresh.parquet", PROMPTS, fresh[: self._config.prepare.test_prompts])

    def _spoil(self, policy: Artifact, base: Artifact) -> tuple[External, External]:
        """A table of answers: the policy's own as sample 0, the base's as 1, then the bad ones.

        Another has the base's answer against each, for an oracle that compares.
        """
        tables = (read_rows(each.file("responses.parquet"), RESPONSES) for each in (policy, base))
        own, honest = (
            [row for row in each if row["sample_index"] == 0][:_PROBED_PROMPTS] for each in tables
        )
        texts = [row["response"] for row in own]
        answers = [
            row | {"sample_index": index, "response": text}
            for row, other, start in zip(own, [*texts[1:], *texts[:1]], honest, strict=True)
            for index, text in enumerate(
                [row["response"], start["response"], *bad_answers(row, other)]
            )
        ]
        honest_by_prompt = {row["prompt_id"]: row["response"] for row in honest}
        against = [row | {"response": honest_by_prompt[row["prompt_id"]]} for row in answers]
        return (
            self._table("bad-answers.parquet", RESPONSES, answers),
            self._table("honest-answers.parquet", RESPONSES, against),
        )

    def _table(self, name: str, schema: Any, rows: Iterable[Mapping[str, Any]]) -> External:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / name
        write_table(path, schema, rows)
        return resolve(str(path), "dataset")

    def _probe(self, answers: External, against: External) -> Any:
        """The step that scores them; an answer that the oracle refuses has no score."""
        score = self._config.score.model_copy(update={"max_null_share": 1.0})
        config = self._config.model_copy(update={"score": score})
        opponents = against if score.compares else None
        step = Steps(config, self._external).score("doubt", 0, answers, opponents)
        return type(step)("bad-answers", step.params, step.inputs)

    def _gain(self, name: str, artifacts: Mapping[str, Artifact], place: str) -> DoubtCheck:
        found = self._difference(artifacts, place, self._config.evaluation)
        low = found.low if found else None
        return DoubtCheck(name=name, passed=low is not None and low > 0, finding=_told(found))

    def _kept(self, suite: str, artifacts: Mapping[str, Artifact]) -> DoubtCheck:
        place = suite_place("doubt", suite)
        found = self._difference(artifacts, place, self._config.for_suite(suite).evaluation)
        fell = found is not None and (found.difference if found.high is None else found.high) < 0
        return DoubtCheck(name=f"suite {suite}", passed=not fell, finding=_told(found))

    def _difference(
        self, artifacts: Mapping[str, Artifact], place: str, evaluation: Any
    ) -> Paired | None:
        prefixes = f"{place}/base", f"{place}/policy"
        return next(iter(against_base(artifacts, evaluation, place, prefixes=prefixes)), None)


def bad_answers(row: Mapping[str, Any], other: str) -> Sequence[str]:
    """Bad answers to a prompt in the order of ``BAD_ANSWERS``.

    ``row`` is a response with its prompt's messages, ``other`` the answer to another prompt.
    """
    answer, words = row["response"], row["response"].split()
    repeated = " ".join([words[0]] * len(words)) if words else ""
    asked = row["messages"][-1]["content"]
    return "", repeated, asked, " ".join([answer] * _LONG), other


def _start(record: RunRecord, external: Mapping[str, Sequence[External]]) -> Source:
    """The policy that the run started from: its warm start, or what it was given."""
    step = record.step("sft")
    made = record.store.load("sft", step.key) if step else None
    if made is not None:
        return made.ref("checkpoint")
    if not external["policy"]:
        raise UserError(
            f"the warm start of {record.name} is no longer in the store",
            f"`geb resume {record.name}` makes it again",
        )
    return external["policy"][0]


def _told(found: Paired | None) -> str:
    if found is None:
        return "no prompt's mean reward differs from the base's"
    shown = f"mean reward {found.second:.3f} against the base's {found.first:.3f}"
    return f"{shown}, difference {found.shown()}, {found.prompts} prompts"


def _probed(path: Path) -> Iterator[DoubtCheck]:
    """A check for each way to spoil an answer: the base's honest answers must score above it."""
    scores: dict[str, dict[int, float | None]] = {}
    for row in read_rows(path, SCORES, columns=["prompt_id", "sample_index", "score"]):
        scores.setdefault(row["prompt_id"], {})[row["sample_index"]] = row["score"]
    for index, name in enumerate(BAD_ANSWERS, 2):
        title = f"oracle on bad answers: {name}"
        known = [
            [score for place in (index, 1, 0) if (score := each[place]) is not None]
            for each in scores.values()
        ]
        whole = [each for each in known if len(each) == 3]
        if not whole:
            yield DoubtCheck(name=title, passed=True, finding="the oracle gives them no score")
            continue
        bad, base, own = np.array(whole).T
        low = paired_difference(bad, base).low
        is_below = bool(low > 0 if low is not None else base.mean() > bad.mean())
        said = f"mean score {bad.mean():.3f}, the base's answers {base.mean():.3f}, the model's "
        said += f"{own.mean():.3f}, {len(whole)} prompts"
        yield DoubtCheck(name=title, passed=is_below, finding=said)


def _other_seeds(record: RunRecord) -> Iterator[DoubtCheck]:
    """A check of the gains of ended runs with the same settings and other seeds, if any."""
    config, name = record.config(), "another training seed"
    gains = []
    for each in runs(record.store):
        other = RunRecord(record.store, each, refresh=False)
        try:
            asked = other.config()
        except GebError:
            # A damaged record is another command's to report.
            continue
        if asked.seed == config.seed or method_of(asked) != method_of(config):
            continue
        summary = summarise(other)
        rewards = [row.get("mean_reward") for row in summary.rows]
        if last_iteration(summary) == asked.iterations and rewards[0] is not None:
            gains.append(rewards[asked.iterations] - rewards[0])
    if not gains:
        said = "the store has no ended run of these settings with another seed; `geb sweep --seeds`"
        yield DoubtCheck(name=name, passed=None, finding=said)
        return
    rose = sum(each > 0 for each in gains)
    said = f"{rose} of {len(gains)} gained, {fmean(gains):+.3f} on average"
    yield DoubtCheck(name=name, passed=rose == len(gains), finding=said)
