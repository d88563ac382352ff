"""Causes of a gain or a loss, from a run's artifacts: kinds of answers, the pairs that taught them.

A kind is a property that an answer has or lacks: an opening, a phrase, a component of the oracle
above its mean, a length. Its part of a gain is the change of its share on the held-out prompts
times the difference that it makes to the score.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import pyarrow.parquet as pq

from flows.report.files import render
from flows.report.rows import Paired, against_base
from flows.report.summary import Summary, last_iteration
from flows.report.table import BASE, POLICY, FittedTable, formatted
from stages.contract.errors import UserError
from stages.tables.join import read_scored
from stages.tables.schemas import PAIRS, read_rows
from stages.training.order import places_of_step

# Beyond them, answers of an evaluation or an iteration say nothing new of what is frequent.
_MOST_ANSWERS = 20_000
_MOST_WORDS = 200
_SHOWN_KINDS = 3
_SHOWN_PROMPTS = 3
# A kind is told from chance if its share moved by so many standard errors.
_STANDARD_ERRORS = 3.0
# Kinds that so large a share of the same answers have are one.
_ALIKE = 0.8
_Key = tuple[str, int]
_Pair = tuple[_Key, _Key, list[int], tuple[float, float] | None]


@dataclass(frozen=True)
class Answer:
    """A scored answer, with all kinds that it is of."""

    prompt: str
    text: str
    score: float
    log_pi: float | None
    words: int
    components: Mapping[str, float]
    kinds: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Taught:
    """A kind in one iteration of training.

    Attributes:
        iteration: Iteration t.
        sampled: Answers of the kind among the training samples.
        of: All training samples.
        won: Pairs in which an answer of the kind was chosen over one that is not; no ties.
        lost: Pairs in which it was rejected for one that is not.
        steps: First and last step of training that saw a pair of those won; None without any.
        log_pi: Mean log π of the sampled answers of the kind, under the policy that sampled them.
        log_pi_ref: Mean log π_ref of those among them that are in pairs.
        share: Share of the kind on the held-out prompts after the iteration.
    """

    iteration: int
    sampled: int
    of: int
    won: int
    lost: int
    steps: tuple[int, int] | None
    log_pi: float | None
    log_pi_ref: float | None
    share: float | None


@dataclass(frozen=True)
class Kind:
    """A kind of answers that changed a run's mean reward.

    Attributes:
        name: The property, in words.
        part: Its part of the difference of mean rewards.
        before: Its share among the base's answers.
        course: Its iterations.
    """

    name: str
    part: float
    before: float
    course: list[Taught] = field(default_factory=list)

    @property
    def first(self) -> int | None:
        """The first iteration that sampled an answer of the kind."""
        return next((each.iteration for each in self.course if each.sampled), None)


@dataclass(frozen=True)
class Lesson:
    """A pair in which an answer of a kind won, and where training met it."""

    iteration: int
    prompt: str
    chosen: str
    rejected: str
    chosen_score: float
    rejected_score: float
    steps: list[int]
    log_pi: tuple[float | None, float | None]
    """log π of chosen and rejected under the policy that sampled them."""
    log_pi_ref: tuple[float, float] | None
    """The same under the reference; None if training left the pair out."""


@dataclass(frozen=True)
class Trace:
    """A held-out prompt whose mean score changed much, with what taught it.

    Attributes:
        prompt: Its last message.
        gain: Mean score of the policy's answers minus the base's.
        base: The base's answer that is nearest to its mean score, with the answer's score.
        policy: The same of the policy.
        kind: Kind that tells them apart, if one of the run's kinds does.
        course: For each iteration, from 0 for the base: share of the kind among the answers, their
            mean log π under the policy that gave them, their mean score.
        lesson: The pair of the most similar prompt in which the kind won; None if none did.
    """

    prompt: str
    gain: float
    base: tuple[str, float]
    policy: tuple[str, float]
    kind: str | None
    course: list[tuple[float | None, float | None, float | None]]
    lesson: Lesson | None


@dataclass(frozen=True)
class Why:
    """Causes of the difference between a run's base and its last evaluated policy."""

    run: str
    iteration: int
    total: Paired | None
    kinds: list[Kind]
    traces: list[Trace]

    def sentence(self) -> str:
        """What changed, and how much of it the kinds account for."""
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
                figures = [f"{t.sampled}/{t.of}", str(t.won), str(t.lost), steps_text(t.steps)]
                figures += [formatted(t.log_pi, ".2f"), formatted(t.share, ".3f")]
                rows.append(["", "", str(t.iteration), *figures])
        dropped = ("lost", "steps", "log π")
        return FittedTable("", header, rows, kept=3, dropped_first=dropped, left=1)

    def page(self) -> str:
        """The page, one file without network."""
        return render("why.html.jinja", why=self, steps_text=steps_text)


def steps_text(steps: Sequence[int] | None) -> str:
    """``12 to 63``, from 1, or a dash."""
    if not steps:
        return "-"
    first, last = steps[0] + 1, steps[-1] + 1
    return str(first) if first == last else f"{first} to {last}"


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
    places = ["base", *(f"iteration-{t}/evaluate" for t in range(1, last + 1))]
    log_pi = [_log_pi(summary, t) for t in range(last + 1)]
    answers = [
        _answers(summary, place, summary.config.evaluation.num_shards, found)
        for place, found in zip(places, log_pi, strict=True)
    ]
    teller = _Teller([*answers[0].values(), *answers[-1].values()])
    evaluated = [teller.told(each) for each in answers]
    kinds = _kinds(list(evaluated[0].values()), list(evaluated[-1].values()))
    training = [_Training.of(summary, t, teller) for t in range(1, last + 1)]
    found = [_with_course(kind, training, evaluated[1:]) for kind in kinds]
    step = f"iteration-{last}/evaluate"
    prefixes = "base", step
    compared = against_base(summary.artifacts, summary.config.evaluation, step, prefixes=prefixes)
    total = next(iter(compared), None)
    return Why(summary.run, last, total, found, list(_traces(found, evaluated, training)))


class _Teller:
    """Tells of which kinds an answer is; lengths and components are told from what is usual."""

    def __init__(self, usual: Sequence[Answer]) -> None:
        lengths = [each.words for each in usual]
        self._lengths = sorted({int(np.quantile(lengths, q)) for q in (0.25, 0.5, 0.75)})
        names = sorted({name for each in usual for name in each.components})
        self._means = {
            name: fmean(each.components[name] for each in usual if name in each.components)
            for name in names
        }

    def told(self, answers: Mapping[_Key, Answer]) -> dict[_Key, Answer]:
        """The same answers with their kinds."""
        return {
            key: Answer(**vars(each) | {"kinds": frozenset(self._kinds(each))})
            for key, each in answers.items()
        }

    def _kinds(self, answer: Answer) -> Iterator[str]:
        for name, mean in self._means.items():
            if answer.components.get(name, mean) > mean:
                yield f"{name} above {mean:.2g}"
        for most in self._lengths:
            if answer.words <= most:
                yield f"at most {most} words"
        words = _words(answer.text)[:_MOST_WORDS]
        yield f"begins with “{words[0]}”" if words else "is empty"
        for number in (1, 2):
            for first in range(len(words) - number + 1):
                yield f"says “{' '.join(words[first : first + number])}”"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _answers(
    summary: Summary, place: str, num_shards: int, log_pi: Mapping[_Key, float] | None = None
) -> dict[_Key, Answer]:
    """Scored answers of a sampling, as far as its artifacts are there."""
    found: dict[_Key, Answer] = {}
    for shard in range(num_shards):
        made = [
            summary.artifacts.get(f"{place}/{stage}/{shard}") for stage in ("generate", "score")
        ]
        if made[0] is None or made[1] is None:
            continue
        paths = [made[0].file("responses.parquet")], [made[1].file("scores.parquet")]
        columns = ["messages", "response", "response_logprobs"]
        for batch in read_scored(*paths, columns=columns, score_columns=["components"]):
            rows = zip(batch.responses.to_pylist(), batch.scored.to_pylist(), strict=True)
            for row, scored in rows:
                if scored["score"] is None:
                    continue
                key = row["prompt_id"], row["sample_index"]
                own = sum(row["response_logprobs"]) if log_pi is None else log_pi.get(key)
                text = row["response"]
                found[key] = Answer(
                    prompt=row["messages"][-1]["content"],
                    text=text,
                    score=scored["score"],
                    log_pi=own,
                    words=len(text.split()),
                    components={k: v for k, v in scored["components"] or () if v is not None},
                )
            if len(found) >= _MOST_ANSWERS:
                return found
    return found


def _log_pi(summary: Summary, iteration: int) -> dict[_Key, float]:
    """Reads log π of the answers of an evaluation, under the policy that gave them."""
    step, model = f"iteration-{iteration or 1}/evaluate", POLICY if iteration else BASE
    if step not in summary.artifacts:
        return {}
    columns = ["model", "prompt_id", "sample_index", "log_pi"]
    table = pq.read_table(summary.artifacts[step].file("distributions.parquet"), columns=columns)
    return {
        (row["prompt_id"], row["sample_index"]): row["log_pi"]
        for row in table.to_pylist()
        if row["model"] == model
    }


def _kinds(base: Sequence[Answer], policy: Sequence[Answer]) -> list[Kind]:
    """Kinds that raised the mean reward most, and those that lowered it, the largest part first."""
    groups = [Counter(kind for each in side for kind in each.kinds) for side in (base, policy)]
    everyone = [*base, *policy]
    sums: defaultdict[str, float] = defaultdict(float)
    for each in everyone:
        for kind in each.kinds:
            sums[kind] += each.score
    total, whole = len(everyone), sum(each.score for each in everyone)
    parts: dict[str, float] = {}
    for kind, score in sums.items():
        count = groups[0][kind] + groups[1][kind]
        if count == total:
            continue
        shares = groups[0][kind] / len(base), groups[1][kind] / len(policy)
        change, share = shares[1] - shares[0], count / total
        error = (share * (1 - share) * (1 / len(base) + 1 / len(policy))) ** 0.5
        if abs(change) > _STANDARD_ERRORS * error:
            parts[kind] = change * (score / count - (whole - score) / (total - count))
    chosen: list[str] = []
    for sign in (1, -1):
        # Of kinds with equal parts the one in fewer words.
        order = sorted(parts, key=lambda kind: (-sign * round(parts[kind], 4), len(kind)))
        chosen += _distinct([kind for kind in order if sign * parts[kind] > 0], everyone)
    chosen.sort(key=lambda kind: -abs(parts[kind]))
    return [Kind(kind, parts[kind], groups[0][kind] / len(base)) for kind in chosen]


def _distinct(kinds: Sequence[str], answers: Sequence[Answer]) -> list[str]:
    """The first kinds that different answers have; a kind and its opposite are one."""
    found: dict[str, np.ndarray] = {}
    for kind in kinds[:200]:
        has = np.array([kind in each.kinds for each in answers])
        alike = [_overlap(has, other) for other in found.values()]
        if all(max(each) < _ALIKE for each in alike):
            found[kind] = has
        if len(found) == _SHOWN_KINDS:
            break
    return list(found)


def _overlap(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Jaccard's similarity of two kinds, and of the first with the second's opposite."""
    return tuple(float((one & each).sum() / max(1, (one | each).sum())) for each in (other, ~other))  # type: ignore[return-value]


@dataclass(frozen=True)
class _Training:
    """Samples and pairs of one iteration; of a pair the answers' keys, its steps, and log π_ref."""

    iteration: int
    answers: Mapping[_Key, Answer]
    pairs: Sequence[_Pair]

    @classmethod
    def of(cls, summary: Summary, iteration: int, teller: _Teller) -> _Training:
        """Reads them; pairs that tie teach no preference and are left out."""
        place, config = f"iteration-{iteration}", summary.config
        answers = teller.told(_answers(summary, place, config.generate.num_shards))
        before = range(1, iteration) if config.pair_data == "accumulate" else ()
        first = sum(_num_pairs(summary, t) for t in before)
        steps, reference = _steps_of(summary, iteration)
        made = summary.artifacts.get(f"{place}/pair")
        columns = ["prompt_id", "chosen_sample_index", "rejected_sample_index", "tie"]
        path = made.file("pairs.parquet") if made else None
        pairs = []
        for index, row in enumerate(read_rows(path, PAIRS, columns=columns) if path else (), first):
            chosen = row["prompt_id"], row["chosen_sample_index"]
            rejected = row["prompt_id"], row["rejected_sample_index"]
            if not row["tie"] and chosen in answers and rejected in answers:
                pairs.append((chosen, rejected, steps.get(index, []), reference.get(index)))
        return cls(iteration, answers, pairs)

    def lessons(self, kind: str, *, lost: bool = False) -> Iterator[_Pair]:
        """Pairs in which the kind won, or lost, against an answer that is not of it."""
        for pair in self.pairs:
            chosen, rejected = (kind in self.answers[key].kinds for key in pair[:2])
            if (chosen, rejected) == ((False, True) if lost else (True, False)):
                yield pair


def _num_pairs(summary: Summary, iteration: int) -> int:
    metrics = summary.read_json(f"iteration-{iteration}/pair", "metrics.json")
    return int(metrics.get("pairs", 0))


def _steps_of(
    summary: Summary, iteration: int
) -> tuple[dict[int, list[int]], dict[int, tuple[float, float]]]:
    """Steps of each pair of a training, and its log π_ref of both responses, by pair index."""
    trained = summary.artifacts.get(f"iteration-{iteration}/train")
    if trained is None:
        return {}, {}
    table = pq.read_table(trained.file("reference_logprobs.parquet")).to_pylist()
    reference = {
        row["pair_index"]: (sum(row["chosen_logprobs"]), sum(row["rejected_logprobs"]))
        for row in table
    }
    params, seed = summary.config.train, trained.manifest.seed
    steps: dict[int, list[int]] = {}
    for step in range(trained.read_json("summary.json")["steps"]):
        for place in places_of_step(len(table), params.global_batch_pairs, seed, step):
            steps.setdefault(table[place]["pair_index"], []).append(step)
    return steps, reference


def _with_course(
    kind: Kind, training: Sequence[_Training], evaluated: Sequence[Mapping[_Key, Answer]]
) -> Kind:
    course = []
    for each, after in zip(training, evaluated, strict=True):
        own = [answer for answer in each.answers.values() if kind.name in answer.kinds]
        won, lost = list(each.lessons(kind.name)), list(each.lessons(kind.name, lost=True))
        steps = sorted(step for *_, found, _ in won for step in found)
        logs = [found[0] for *_, found in won if found] + [found[1] for *_, found in lost if found]
        course.append(
            Taught(
                iteration=each.iteration,
                sampled=len(own),
                of=len(each.answers),
                won=len(won),
                lost=len(lost),
                steps=(steps[0], steps[-1]) if steps else None,
                log_pi=_mean(answer.log_pi for answer in own if answer.log_pi is not None),
                log_pi_ref=_mean(logs),
                share=_mean(float(kind.name in answer.kinds) for answer in after.values()),
            )
        )
    return Kind(kind.name, kind.part, kind.before, course)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def _traces(
    kinds: Sequence[Kind],
    evaluated: Sequence[Mapping[_Key, Answer]],
    training: Sequence[_Training],
) -> Iterator[Trace]:
    """The prompts with the largest gains, then those with the largest losses."""
    by_prompt = [_by_prompt(each) for each in evaluated]
    base, policy = by_prompt[0], by_prompt[-1]
    gains = {
        prompt: fmean(each.score for each in policy[prompt]) - fmean(each.score for each in own)
        for prompt, own in base.items()
        if prompt in policy
    }
    order = sorted(gains, key=lambda prompt: (-gains[prompt], prompt))
    chosen = [each for each in order[:_SHOWN_PROMPTS] if gains[each] > 0]
    chosen += [each for each in order[::-1][:_SHOWN_PROMPTS] if gains[each] < 0]
    for prompt in chosen:
        sides = base[prompt], policy[prompt]
        kind = _telling(kinds, *sides, gains[prompt])
        course = [_course(kind, each.get(prompt, ())) for each in by_prompt]
        lesson = _lesson(kind, sides[0][0].prompt, training) if kind else None
        shown = _typical(sides[0]), _typical(sides[1])
        yield Trace(sides[0][0].prompt, gains[prompt], *shown, kind, course, lesson)


def _by_prompt(answers: Mapping[_Key, Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for (prompt, _), answer in answers.items():
        found.setdefault(prompt, []).append(answer)
    return found


def _typical(answers: Sequence[Answer]) -> tuple[str, float]:
    mean = fmean(each.score for each in answers)
    found = min(answers, key=lambda each: abs(each.score - mean))
    return found.text, found.score


def _telling(
    kinds: Sequence[Kind], base: Sequence[Answer], policy: Sequence[Answer], gain: float
) -> str | None:
    """The kind whose share changed most on a prompt, in the direction of its gain."""
    found: dict[str, float] = {}
    for kind in kinds:
        shares = [fmean(kind.name in each.kinds for each in side) for side in (base, policy)]
        own = [answer.score for answer in (*base, *policy) if kind.name in answer.kinds]
        rest = [answer.score for answer in (*base, *policy) if kind.name not in answer.kinds]
        if own and rest and shares[1] > shares[0] and gain * (fmean(own) - fmean(rest)) > 0:
            found[kind.name] = shares[1] - shares[0]
    return max(found, key=lambda name: found[name]) if found else None


def _course(
    kind: str | None, answers: Sequence[Answer]
) -> tuple[float | None, float | None, float | None]:
    share = _mean(float(kind in each.kinds) for each in answers) if kind else None
    log_pi = _mean(each.log_pi for each in answers if each.log_pi is not None)
    return share, log_pi, _mean(each.score for each in answers)


def _lesson(kind: str, prompt: str, training: Sequence[_Training]) -> Lesson | None:
    """The pair of the most similar prompt in which the kind won, in the first iteration of any."""
    words = set(_words(prompt))
    for each in training:
        found = list(each.lessons(kind))
        if not found:
            continue

        def likeness(pair: _Pair, each: _Training = each) -> float:
            other = set(_words(each.answers[pair[0]].prompt))
            return len(words & other) / len(words | other)

        chosen, rejected, steps, reference = max(found, key=likeness)
        won, lost = each.answers[chosen], each.answers[rejected]
        scores, log_pi = (won.score, lost.score), (won.log_pi, lost.log_pi)
        texts = won.prompt, won.text, lost.text
        return Lesson(each.iteration, *texts, *scores, steps, log_pi, reference)
    return None
