"""Length-controlled win rate by AlpacaEval's own regression (Dubois et al. 2024, arXiv 2404.04475).

Runs where ``alpaca_eval`` is installed: the environment and the image `eval`, which have no torch.

Shapes: ``R`` annotations, one for each compared response.
"""

from __future__ import annotations

import csv
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.contract.context import StageContext
from stages.contract.errors import UserError
from stages.contract.join import read_scored
from stages.evaluate.params import EvaluateParams
from stages.evaluate.summary import Metrics

NAME = "length_controlled_win_rate"
GAMED, BASELINE = "df_gamed.csv", "alpaca_eval_gpt4_baseline.json"
"""Files of the hub's data set `tatsu-lab/alpaca_eval` that the published regression needs."""
# Folds of the library's cross-validation.
_FEWEST = 5

Annotation = dict[str, Any]
Key = tuple[str, int]


@dataclass(frozen=True)
class _Compared:
    """A response and how the judge found it beside the answer that it was compared with."""

    instruction: str
    response: str
    reference: str | None
    score: float


def length_controlled(ctx: StageContext[EvaluateParams]) -> Metrics:
    """The win rate that a model would have if its answers were as long as its opponent's.

    Scores are those of a judge that compares, from 0 (lost) to 1 (won). The regression is that of
    AlpacaEval 2 where the input ``length_control`` brings its data, and else the library's
    `length_controlled_minimal`, which knows no difficulty of an instruction.

    Returns:
        ``length_controlled_win_rate`` from 0 to 1, and its interval (percentile bootstrap over
        prompts); against reference answers also the base's, as ``base_…``. None where all answers
        differ in length by as much.

    Raises:
        UserError: The library or its data is missing, there are too few comparisons, or the scores
            are no comparisons.
    """
    regression = _Regression.of(ctx)
    policy, base = _compared(ctx, ""), _compared(ctx, "base_")
    if ctx.params.length_controlled == "base":
        opponents = {key: each.response for key, each in base.items()}
        return regression.metrics(policy, opponents, "")
    found: Metrics = {}
    for prefix, own in (("", policy), ("base_", base)):
        answers = {key: each.reference for key, each in own.items() if each.reference is not None}
        found |= regression.metrics(own, answers, prefix)
    return found


def _compared(ctx: StageContext[EvaluateParams], prefix: str) -> dict[Key, _Compared]:
    """Compared responses by prompt and sample; prompts with an unscored response are left out."""
    found: dict[Key, _Compared] = {}
    columns = ("messages", "response", "reference_answer")
    files = ctx.paths(f"{prefix}responses"), ctx.paths(f"{prefix}scores")
    for batch in read_scored(*files, columns=columns):
        rows, scores = batch.responses.to_pylist(), batch.scores.to_pylist()
        unscored = {
            row["prompt_id"] for row, score in zip(rows, scores, strict=True) if score is None
        }
        for row, score in zip(rows, scores, strict=True):
            if row["prompt_id"] in unscored:
                continue
            if not 0 <= score <= 1:
                raise UserError(
                    f"evaluate.length_controlled is set, and a score is {score:g}: a length-"
                    "controlled win rate is made of comparisons, from 0 (lost) to 1 (won)",
                    "use the oracle judge with judge.mode pairwise, or leave it off",
                )
            key = row["prompt_id"], row["sample_index"]
            instruction = row["messages"][-1]["content"]
            found[key] = _Compared(instruction, row["response"], row["reference_answer"], score)
    return found


@dataclass(frozen=True)
class _Regression:
    """The library's regression, and what it needs to know of the instructions.

    Attributes:
        name: Its name in the library.
        gamed: Its table of difficulties; for the minimal one, of instructions without any.
        places: Place of each instruction in AlpacaEval's set; None numbers them as they come.
        resamples: Resamples of the bootstrap.
        work: Folder for files that last as long as the stage.
        warn: Takes a warning.
    """

    name: str
    gamed: Path | None
    places: Mapping[str, int] | None
    resamples: int
    work: Path
    warn: Any

    @classmethod
    def of(cls, ctx: StageContext[EvaluateParams]) -> _Regression:
        resamples = ctx.params.length_control_resamples
        rest = resamples, ctx.work, ctx.events.warning
        if not ctx.has("length_control"):
            return cls("length_controlled_minimal", None, None, *rest)
        folder = ctx.path("length_control")
        for name in (GAMED, BASELINE):
            if not (folder / name).is_file():
                raise UserError(
                    f"{folder} has no file {name}, which AlpacaEval's regression needs",
                    f"hf download tatsu-lab/alpaca_eval {GAMED} {BASELINE} --repo-type dataset "
                    f"--local-dir {folder}",
                )
        rows = json.loads((folder / BASELINE).read_text())
        # The first of equal instructions.
        places = {row["instruction"]: place for place, row in reversed(list(enumerate(rows)))}
        return cls("length_controlled_v1", folder / GAMED, places, *rest)

    def metrics(
        self, own: Mapping[Key, _Compared], others: Mapping[Key, str], prefix: str
    ) -> Metrics:
        """Metrics of one model's responses against others of the same keys."""
        annotations = list(self._annotations(own, others))
        if len(annotations) < _FEWEST:
            raise UserError(
                f"{len(annotations)} comparisons are too few for a length-controlled win rate",
                f"evaluate on at least {_FEWEST} prompts whose responses have scores",
            )
        differences = {len(each["output_2"]) - len(each["output_1"]) for each in annotations}
        if len(differences) == 1:
            self.warn(
                f"{prefix}{NAME}: all answers differ in length by as much; nothing to control"
            )
            return {f"{prefix}{NAME}": None, f"{prefix}{NAME}_interval": None}
        estimate = self._win_rate(annotations)
        return {
            f"{prefix}{NAME}": estimate,
            f"{prefix}{NAME}_interval": self._interval(annotations),
        }

    def _annotations(
        self, own: Mapping[Key, _Compared], others: Mapping[Key, str]
    ) -> Iterator[Annotation]:
        """Comparisons in AlpacaEval's format: preference 1 the first output, 2 the second."""
        numbers: dict[str, int] = {}
        for key, each in own.items():
            if key not in others:
                continue
            number = numbers.setdefault(each.instruction, len(numbers))
            if self.places is not None:
                if each.instruction not in self.places:
                    raise UserError(
                        f"the prompt {each.instruction[:80]!r} is not one of AlpacaEval's",
                        "evaluate on AlpacaEval's prompts, or leave `length_control` out for a "
                        "regression without their difficulties",
                    )
                number = self.places[each.instruction]
            yield {
                "index": number,
                "instruction": each.instruction,
                "generator_1": "opponent",
                "generator_2": "model",
                "output_1": others[key],
                "output_2": each.response,
                "preference": 1 + each.score,
                "annotator": "judge",
            }

    def _interval(self, annotations: list[Annotation]) -> list[float] | None:
        """95 % percentile bootstrap; a prompt's comparisons enter a resample together."""
        if self.resamples == 0:
            return None
        of_prompt: dict[int, list[Annotation]] = {}
        for each in annotations:
            of_prompt.setdefault(each["index"], []).append(each)
        prompts = list(of_prompt.values())
        # Any fixed number: the same comparisons have the same interval.
        rng = np.random.default_rng(20260101)
        found = [
            self._win_rate([each for place in drawn for each in prompts[place]])
            for drawn in rng.integers(len(prompts), size=(self.resamples, len(prompts)))
        ]
        return [float(end) for end in np.quantile(found, (0.025, 0.975))]

    def _win_rate(self, annotations: list[Annotation]) -> float:
        glm = _library()
        gamed = self.gamed or self._without_difficulties(annotations)
        # The library fetches this file from the hub, at whatever is there today.
        glm.hf_hub_download = lambda **_: str(gamed)
        with warnings.catch_warnings():
            # Of scikit-learn's next versions; constraints/eval.txt has the one that was tried.
            warnings.simplefilter("ignore", FutureWarning)
            found = glm.get_length_controlled_winrate(
                annotations,
                glm_name=self.name,
                save_weights_dir=None,
                is_add_glm_preference_inplace=False,
                is_warn_extreme_changes=False,
            )
        return float(found["length_controlled_winrate"]) / 100

    def _without_difficulties(self, annotations: list[Annotation]) -> Path:
        """The library's table for the minimal regression, which looks difficulties up in vain."""
        path = self.work / GAMED
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["model", "index", "instruction_difficulty"])
            writer.writerows(["none", place, 0.0] for place in range(len(annotations)))
        return path


def _library() -> Any:
    """The module of the library's regression.

    Raises:
        UserError: The library is not installed.
    """
    try:
        from alpaca_eval.metrics import glm_winrate
    except ImportError as error:
        raise UserError(
            f"evaluate.length_controlled needs AlpacaEval's own code ({error})",
            "run `make setup-eval`, and set execution.interpreters.eval to .venv-eval/bin/python",
        ) from error
    # It sets up logging of its own.
    logging.getLogger("alpaca_eval").setLevel(logging.ERROR)
    return glm_winrate
