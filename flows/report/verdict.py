"""The verdict on a run: one sentence, its reasons, and how far to trust it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flows.execution.run_record import resume_command
from flows.report.status import DONE, RunStatus
from flows.report.summary import Summary
from flows.report.table import FigureRow, column_of, ordered, shown


@dataclass(frozen=True)
class Verdict:
    """One sentence on a run.

    Attributes:
        tone: `good` if the last model passed every gate; `bad` if the run did not come to its end,
            an artifact is damaged, or a gate held the model back; `open` if no gate has decided, or
            no alias moved.
        sentence: The result, with its interval.
        reasons: Obstacles: failed steps, damaged artifacts, gates, pairs that tie.
        cautions: How far to trust it: seeds and prompts, and what became worse.
    """

    tone: Literal["good", "bad", "open"]
    sentence: str
    reasons: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def verdict(summary: Summary) -> Verdict:
    """Verdict after the last iteration that has been evaluated.

    A run that failed, was stopped or lacks steps gets no other verdict than this.
    """
    result = _of_models(summary)
    tone = result.tone
    sentence = result.sentence
    reasons = [*result.reasons, *_ties(summary)]
    resume = resume_command(summary.run, summary.store)
    status = summary.status
    has_failed = status is not None and status.state not in ("running", "completed")
    if status is not None and (has_failed or status.num_done < status.num_steps):
        done = f"{status.num_done} of {status.num_steps} steps are done"
        if status.state == "running":
            tone = "open"
            sentence = f"The run is at work: {done}. {sentence}"
        else:
            tone = "bad"
            sentence = (
                f"The run is not complete ({status.state}): {done}. Go on with `{resume}`. "
                f"So far: {sentence}"
            )
            reasons = [*_unfinished(status), *reasons]
    elif summary.damaged:
        tone = "bad"
        sentence = (
            "Artifacts are damaged, and figures are missing here. "
            f"`{resume}` computes them again. {sentence}"
        )
        reasons = [*summary.damaged, *reasons]
    return Verdict(tone, sentence, tuple(reasons), tuple(_cautions(summary)))


def _unfinished(status: RunStatus) -> Iterator[str]:
    """Messages of steps that failed or were stopped, and the number of those to come."""
    for step in status.steps:
        if step.state not in DONE:
            cause, *_ = step.message.splitlines() or [step.step]
            yield f"{step.state}: {cause}"
    if status.waiting:
        yield f"steps that have not begun: {len(status.waiting)}"


def _of_models(summary: Summary) -> Verdict:
    """Sentences of the evaluations and the gates."""
    if summary.last_iteration == 0:
        return Verdict("open", "No iteration has been evaluated yet.")
    row = summary.rows[summary.last_iteration]
    sentence = _sentence(row, summary.rows[0])
    decision = summary.read_json(row.iteration, "promote", "decision.json")
    if not decision:
        return Verdict("open", f"{sentence}.")
    reasons = [gate["reason"] for gate in decision["gates"] if not gate["passed"]]
    if reasons:
        return Verdict("bad", f"{sentence}. It was not promoted.", tuple(reasons))
    aliases = ", ".join(summary.config.promote.aliases)
    if aliases and not decision["aliases"]:
        reason = (
            f"a higher iteration of this run's name, perhaps of an earlier start, holds "
            f"{aliases}: move it with `geb promote`"
        )
        return Verdict("open", f"{sentence}. It passed every gate and was not promoted.", (reason,))
    promoted = f" and was promoted to {', '.join(decision['aliases'])}" if aliases else ""
    return Verdict("good", f"{sentence}. It passed every gate{promoted}.")


def _sentence(row: FigureRow, base: FigureRow) -> str:
    """Win rate and mean reward after an iteration, without a full stop."""
    plural = "s" if row.iteration > 1 else ""
    wins = shown(row.figures["win_rate"], ".1%")
    ties = row.values["tied_prompts"]
    shown_ties = f" ({ties:.0f} tie)" if ties else ""
    reward = shown(row.figures["mean_reward"], ".3f")
    return (
        f"After {row.iteration} iteration{plural} the model scores above its base on {wins} of the "
        f"held-out prompts{shown_ties}; its mean reward is {reward}, the base's "
        f"{base.values['mean_reward']:.3f}"
    )


def _ties(summary: Summary) -> Iterator[str]:
    """Iterations of which nearly all pairs tie."""
    for row in summary.rows[1:]:
        pairs = int(row.values.get("pairs", 0))
        ties = int(row.values.get("ties", 0))
        warning = summary.config.pair.tie_warning(pairs, ties)
        if warning:
            yield f"iteration {row.iteration}: {warning}"


def _cautions(summary: Summary) -> Iterator[str]:
    """Limits of the verdict on the last model: doubts of trainings, few prompts, lower figures."""
    for iteration, trained in summary.made("train").items():
        for sentence in trained.read_json("summary.json").get("cautions", ()):
            yield f"training of iteration {iteration}: {sentence}"
    iteration = summary.last_iteration
    evaluated = summary.artifact(iteration, "evaluate")
    if evaluated is None:
        return
    prompts = evaluated.read_json("metrics.json")["compared_prompts"]
    yield f"one training seed, {prompts} held-out prompts; `geb sweep --seeds` tries other seeds"
    yield from _falls("", [summary.rows[0], summary.rows[iteration]])
    for name, rows in summary.suites.items():
        yield from _falls(f"suite {name}, ", rows)


def _falls(evaluation: str, rows: Sequence[FigureRow]) -> Iterator[str]:
    """Yields a sentence for each score that is lower in the last row than in the first."""
    for name in ordered(rows[0].figures):
        first = rows[0].figures[name]
        last = rows[-1].figures.get(name)
        is_score = name.startswith(("mean_reward", "accuracy", "components.", "pass@"))
        if is_score and last is not None and last.value < first.value:
            title = column_of(name).title
            now = shown(last, ".3f")
            yield f"{evaluation}{title} fell from {first.value:.3f} to {now}"
