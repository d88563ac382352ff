"""Causes of a gain or a loss, from a run's artifacts: kinds of answers, the pairs that taught them.

A kind is a property that an answer has or lacks: an opening, a phrase, a component of the oracle
above its mean, a length. Its part of a gain is the change of its share on the held-out prompts
times the difference that it makes to the score.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import pyarrow.parquet as pq

from flows.report.rows import Paired, against_base
from flows.report.summary import Summary, last_iteration
from flows.report.table import FittedTable, formatted
from stages.contract.errors import UserError
from stages.tables.join import read_scored
from stages.tables.schemas import PAIRS, read_rows
from stages.training.order import places_of_step

# Beyond them, answers of an evaluation or an iteration say nothing new of what is frequent.
_MOST_ANSWERS = 20_000
_MOST_WORDS = 200
_LENGTHS = (8, 16, 32, 64, 128, 256)
# Kinds that raised the mean reward, and kinds that lowered it.
_SHOWN = 3
# A kind is told from chance if its share moved by so many standard errors.
_STANDARD_ERRORS = 3.0
# Kinds that so large a share of the same answers have, or lack, are one.
_ALIKE = 0.8
_Key = tuple[str, int]


@dataclass(frozen=True)
class Answer:
    """A scored answer; `kinds` are all that it is of."""

    prompt: str
    text: str
    score: float
    log_pi: float | None
    kinds: frozenset[str]


Answers = Mapping[_Key, Answer]
"""By prompt and number of the sample."""


@dataclass(frozen=True)
class Lesson:
    """A pair that does not tie, with the steps of training (from 0) that saw it, and log π_ref."""

    iteration: int
    chosen: Answer
    rejected: Answer
    steps: Sequence[int]
    log_pi_ref: tuple[float, float] | None


@dataclass(frozen=True)
class Taught:
    """A kind in one iteration of training.

    Attributes:
        sampled: Answers of the kind among the training samples.
        won: Pairs in which an answer of the kind was chosen over one that is not; no ties.
        lost: Pairs in which it was rejected for one that is not.
        steps: First and last step of training, from 1, that saw a pair of those won.
        log_pi: Mean log π of the sampled answers of the kind, under the policy that sampled them.
        share: Share of the kind on the held-out prompts after the iteration.
    """

    iteration: int
    sampled: int
    of: int
    won: int
    lost: int
    steps: tuple[int, int] | None
    log_pi: float | None
    share: float | None


@dataclass(frozen=True)
class Kind:
    """A kind of answers.

    Attributes:
        part: Its part of the gain.
        before: Its share of the base's answers.
        first: The pair in which it won that training saw first; None if it won in none.
    """

    name: str
    part: float
    before: float
    course: Sequence[Taught] = ()
    first: Lesson | None = None


@dataclass(frozen=True)
class Why:
    """Causes of the difference between a run's base and its last evaluated policy."""

    run: str
    iteration: int
    total: Paired | None
    kinds: list[Kind]

    def sentence(self) -> str:
        """The change of the mean reward, and the kind that explains most of it."""
        if self.total is None:
            return "No prompt's mean reward changed between base and policy."
        found = f"The mean reward went from {self.total.first:.3f} to {self.total.second:.3f}, by "
        found += f"{self.total.shown()}, over {self.total.prompts} held-out prompts."
        if not self.kinds:
            return f"{found} No kind of answers changed its share by more than chance."
        return f"{found} The kind that explains most: {self.kinds[0].name}."

    def table(self) -> FittedTable:
        """A row for each kind and iteration."""
        header = ("kind", "part", "iteration", "sampled", "won", "lost", "steps", "log π", "share")
        rows = []
        for each in self.kinds:
            rows.append([each.name, f"{each.part:+.3f}", "base", *["-"] * 5, f"{each.before:.3f}"])
            for t in each.course:
                steps = "{} to {}".format(*t.steps) if t.steps else "-"
                figures = [f"{t.sampled}/{t.of}", str(t.won), str(t.lost), steps]
                figures += [formatted(t.log_pi, ".2f"), formatted(t.share, ".3f")]
                rows.append(["", "", str(t.iteration), *figures])
        dropped = ("lost", "steps", "log π")
        return FittedTable("", header, rows, kept=3, dropped_first=dropped, left=1)


def explain(summary: Summary) -> Why:
    """Finds what changed between base and last policy, and what taught it.

    Raises:
        UserError: No iteration of the run has been evaluated.
    """
    last = last_iteration(summary)
    if last is None:
        raise UserError(
            f"run {summary.run} has no evaluated iteration",
            f"`geb status {summary.run}` shows how far it is; resume it first",
        )
    step, evaluation = f"iteration-{last}/evaluate", summary.config.evaluation
    places = ["base", *(f"iteration-{t}/evaluate" for t in range(1, last + 1))]
    evaluated = [_answers(summary, place, evaluation.num_shards) for place in places]
    training = [
        _answers(summary, f"iteration-{t}", summary.config.generate.num_shards)
        for t in range(1, last + 1)
    ]
    lessons = [list(_lessons(summary, t, each)) for t, each in enumerate(training, 1)]
    kinds = [
        replace(
            kind,
            course=[
                _taught(kind.name, t, *each)
                for t, each in enumerate(zip(training, lessons, evaluated[1:], strict=True), 1)
            ],
            first=_first(kind.name, lessons),
        )
        for kind in _kinds(list(evaluated[0].values()), list(evaluated[-1].values()))
    ]
    total = against_base(summary.artifacts, evaluation, step, prefixes=("base", step))
    return Why(summary.run, last, total[0] if total else None, kinds)


def _answers(summary: Summary, place: str, num_shards: int) -> dict[_Key, Answer]:
    """Scored answers of a sampling, as far as its artifacts are there."""
    names = {name for row in summary.rows for name in row["components"]}
    means = {
        name: fmean(row["components"][name] for row in summary.rows if name in row["components"])
        for name in sorted(names)
    }
    columns = ["messages", "response", "response_logprobs"]
    found: dict[_Key, Answer] = {}
    tables = summary.scored(place, num_shards)
    for batch in read_scored(*tables, columns=columns, score_columns=["components"]):
        rows = zip(batch.responses.to_pylist(), batch.scored.to_pylist(), strict=True)
        for row, scored in rows:
            if scored["score"] is not None:
                parts = {k: v for k, v in scored["components"] or () if v is not None}
                kinds = frozenset(_kinds_of(row["response"], parts, means))
                log_pi = sum(row["response_logprobs"])
                found[row["prompt_id"], row["sample_index"]] = Answer(
                    prompt=row["messages"][-1]["content"],
                    text=row["response"],
                    score=scored["score"],
                    # A server may not tell it.
                    log_pi=None if math.isnan(log_pi) else log_pi,
                    kinds=kinds,
                )
        if len(found) >= _MOST_ANSWERS:
            break
    return found


def _kinds_of(
    text: str, components: Mapping[str, float], means: Mapping[str, float]
) -> Iterator[str]:
    for name, mean in means.items():
        if components.get(name, mean) > mean:
            yield f"{name} above {mean:.2g}"
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    yield from (f"at most {most} words" for most in _LENGTHS if len(text.split()) <= most)
    yield f"begins with “{words[0]}”" if words else "is empty"
    for number in (1, 2):
        for first in range(min(len(words), _MOST_WORDS) - number + 1):
            yield f"says “{' '.join(words[first : first + number])}”"


def _kinds(base: Sequence[Answer], policy: Sequence[Answer]) -> list[Kind]:
    """Kinds that raised the mean reward most, and those that lowered it, the largest part first."""
    holders: defaultdict[str, set[int]] = defaultdict(set)
    everyone = [*base, *policy]
    for place, each in enumerate(everyone):
        for kind in each.kinds:
            holders[kind].add(place)
    total, whole = len(everyone), math.fsum(each.score for each in everyone)
    found = []
    for name, places in holders.items():
        if (count := len(places)) == total:
            continue
        of_base = sum(place < len(base) for place in places)
        before, share = of_base / len(base), count / total
        change = (count - of_base) / len(policy) - before
        error = math.sqrt(share * (1 - share) * (1 / len(base) + 1 / len(policy)))
        if abs(change) > _STANDARD_ERRORS * error:
            score = math.fsum(everyone[place].score for place in places)
            part = change * (score / count - (whole - score) / (total - count))
            found.append(Kind(name, part, before))
    chosen: list[Kind] = []
    for sign in (1, -1):
        # The kind in fewer words comes first if two have equal parts.
        order = sorted(found, key=lambda each: (-sign * round(each.part, 4), len(each.name)))
        own: list[Kind] = []
        for new in (each for each in order if sign * each.part > 0):
            alike = (_overlap(holders[new.name], holders[other.name], total) for other in own)
            if len(own) < _SHOWN and max(alike, default=0.0) < _ALIKE:
                own.append(new)
        chosen += own
    return sorted(chosen, key=lambda each: -abs(each.part))


def _overlap(one: set[int], other: set[int], total: int) -> float:
    """Jaccard's similarity of two kinds, or of the first with the second's opposite."""
    both, either = len(one & other), len(one | other)
    without = len(one - other) / (total - len(other - one))
    return max(both / either, without)


def _lessons(summary: Summary, iteration: int, answers: Answers) -> Iterator[Lesson]:
    """Pairs of an iteration that do not tie, as far as their answers are known."""
    made = summary.artifacts.get(f"iteration-{iteration}/pair")
    trained = summary.artifacts.get(f"iteration-{iteration}/train")
    if made is None or trained is None:
        return
    reference = pq.read_table(trained.file("reference_logprobs.parquet")).to_pylist()
    params = summary.config.train
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for step in range(trained.read_json("summary.json")["steps"]):
        for place in places_of_step(
            len(reference), params.global_batch_pairs, trained.manifest.seed, step
        ):
            steps[reference[place]["pair_index"]].append(step)
    logs = {
        row["pair_index"]: (sum(row["chosen_logprobs"]), sum(row["rejected_logprobs"]))
        for row in reference
    }
    # A training on accumulated pairs counts those of earlier iterations first.
    earlier = range(1, iteration) if summary.config.pair_data == "accumulate" else ()
    first = sum(row["pairs"] or 0 for row in summary.rows if row["iteration"] in earlier)
    columns = ["prompt_id", "chosen_sample_index", "rejected_sample_index", "tie"]
    rows = read_rows(made.file("pairs.parquet"), PAIRS, columns=columns)
    for index, row in enumerate(rows, first):
        chosen = answers.get((row["prompt_id"], row["chosen_sample_index"]))
        rejected = answers.get((row["prompt_id"], row["rejected_sample_index"]))
        if chosen and rejected and not row["tie"]:
            yield Lesson(iteration, chosen, rejected, steps[index], logs.get(index))


def _won(kind: str, lessons: Iterable[Lesson], *, lost: bool = False) -> list[Lesson]:
    """Pairs in which the kind won, or lost, against an answer that is not of it."""
    wanted = (False, True) if lost else (True, False)
    return [
        each
        for each in lessons
        if (kind in each.chosen.kinds, kind in each.rejected.kinds) == wanted
    ]


def _taught(
    kind: str, iteration: int, answers: Answers, lessons: Sequence[Lesson], after: Answers
) -> Taught:
    own = [each for each in answers.values() if kind in each.kinds]
    won = _won(kind, lessons)
    steps = [step + 1 for each in won for step in each.steps]
    return Taught(
        iteration=iteration,
        sampled=len(own),
        of=len(answers),
        won=len(won),
        lost=len(_won(kind, lessons, lost=True)),
        steps=(min(steps), max(steps)) if steps else None,
        log_pi=_mean(each.log_pi for each in own),
        share=_mean(float(kind in each.kinds) for each in after.values()),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return fmean(known) if known else None


def _first(kind: str, lessons: Iterable[Sequence[Lesson]]) -> Lesson | None:
    """The pair that training saw first of those in which a kind won."""
    seen = (each for own in lessons for each in _won(kind, own) if each.steps)
    return min(seen, key=lambda each: (each.iteration, each.steps[0]), default=None)
