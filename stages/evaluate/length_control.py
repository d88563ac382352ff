"""Length-controlled win rate by AlpacaEval's own regression (Dubois et al. 2024, arXiv 2404.04475).

Runs if ``alpaca_eval`` is installed: the environment and the image `eval`, which have no torch.

Shapes: ``R`` annotations, one for each compared response.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from stages.contract.errors import UserError
from stages.evaluate.params import EvaluateParams
from stages.evaluate.summary import Metrics
from stages.harness.context import StageContext
from stages.tables.join import read_scored

NAME = "length_controlled_win_rate"
GAMED = "df_gamed.csv"
BASELINE = "alpaca_eval_gpt4_baseline.json"
"""Files of the hub's data set `tatsu-lab/alpaca_eval` that the published regression needs."""
# Folds of the library's cross-validation.
_FEWEST = 5

Annotation = dict[str, Any]
Key = tuple[str, int]


def length_controlled(ctx: StageContext[EvaluateParams]) -> Metrics:
    """The win rate that a model would have if its answers were as long as its opponent's.

    Scores are those of a judge that compares, from 0 (lost) to 1 (won). The regression is that of
    AlpacaEval 2 if the input ``length_control`` brings its data, and else the library's
    `length_controlled_minimal`, which knows no difficulty of an instruction.

    Returns:
        ``length_controlled_win_rate`` from 0 to 1, and its interval (percentile bootstrap over
        prompts); against reference answers also the base's, as ``base_…``. None if all answers
        differ in length by as much.

    Raises:
        UserError: The library or its data is missing, there are too few comparisons, or the scores
            are no comparisons.
    """
    regression = _Regression(ctx)
    policy = _compared(ctx, "")
    base = _compared(ctx, "base_")
    if ctx.params.length_controlled == "base":
        opponents = {key: row["response"] for key, row in base.items()}
        return regression.metrics(policy, opponents, "")
    found: Metrics = {}
    for prefix, own in (("", policy), ("base_", base)):
        answers = {key: row["reference_answer"] for key, row in own.items()}
        known = {key: answer for key, answer in answers.items() if answer is not None}
        found |= regression.metrics(own, known, prefix)
    return found


def _compared(ctx: StageContext[EvaluateParams], prefix: str) -> dict[Key, dict[str, Any]]:
    """Compared responses with their scores, by prompt and sample.

    Prompts with an unscored response are left out.
    """
    found: dict[Key, dict[str, Any]] = {}
    columns = ("messages", "response", "reference_answer")
    files = ctx.paths(f"{prefix}responses"), ctx.paths(f"{prefix}scores")
    for batch in read_scored(*files, columns=columns):
        rows = batch.responses.to_pylist()
        scores = batch.scores.to_pylist()
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
            found[row["prompt_id"], row["sample_index"]] = row | {"score": score}
    return found


def _as_long(annotations: Sequence[Annotation]) -> bool:
    """True if the answers of each comparison differ in length by as much."""
    return len({len(each["output_2"]) - len(each["output_1"]) for each in annotations}) == 1


class _Regression:
    """The library's regression, and what it needs to know of the instructions.

    Args:
        ctx: The stage's input ``length_control``, settings, folder for files, and warnings.
    """

    def __init__(self, ctx: StageContext[EvaluateParams]) -> None:
        self._ctx = ctx
        self._name = "length_controlled_minimal"
        self._gamed: Path | None = None
        # Place of each instruction in AlpacaEval's set; None numbers them as they come.
        self._places: dict[str, int] | None = None
        if not ctx.has("length_control"):
            return
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
        self._places = {row["instruction"]: n for n, row in reversed(list(enumerate(rows)))}
        self._name = "length_controlled_v1"
        self._gamed = folder / GAMED

    def metrics(
        self, own: Mapping[Key, Mapping[str, Any]], others: Mapping[Key, str], prefix: str
    ) -> Metrics:
        """Metrics of one model's responses against others of the same keys."""
        annotations = list(self._annotations(own, others))
        if len(annotations) < _FEWEST:
            raise UserError(
                f"{len(annotations)} comparisons are too few for a length-controlled win rate",
                f"evaluate on at least {_FEWEST} prompts whose responses have scores",
            )
        if _as_long(annotations):
            self._ctx.events.warning(
                f"{prefix}{NAME}: all answers differ in length by as much; nothing to control"
            )
            return {f"{prefix}{NAME}": None, f"{prefix}{NAME}_interval": None}
        return {
            f"{prefix}{NAME}": self._win_rate(annotations),
            f"{prefix}{NAME}_interval": self._interval(annotations),
        }

    def _annotations(
        self, own: Mapping[Key, Mapping[str, Any]], others: Mapping[Key, str]
    ) -> Iterator[Annotation]:
        """Comparisons in AlpacaEval's format: preference 1 the first output, 2 the second."""
        numbers: dict[str, int] = {}
        for key in (each for each in own if each in others):
            instruction = own[key]["messages"][-1]["content"]
            number = numbers.setdefault(instruction, len(numbers))
            if self._places is not None:
                if instruction not in self._places:
                    raise UserError(
                        f"the prompt {instruction[:80]!r} is not one of AlpacaEval's",
                        "evaluate on AlpacaEval's prompts, or leave `length_control` out for a "
                        "regression without their difficulties",
                    )
                number = self._places[instruction]
            yield {
                "index": number,
                "instruction": instruction,
                "generator_1": "opponent",
                "generator_2": "model",
                "output_1": others[key],
                "output_2": own[key]["response"],
                "preference": 1 + own[key]["score"],
                "annotator": "judge",
            }

    def _interval(self, annotations: list[Annotation]) -> list[float] | None:
        """95 % percentile bootstrap; a prompt's comparisons enter a resample together."""
        resamples = self._ctx.params.length_control_resamples
        if resamples == 0:
            return None
        of_prompt: dict[int, list[Annotation]] = {}
        for each in annotations:
            of_prompt.setdefault(each["index"], []).append(each)
        prompts = list(of_prompt.values())
        # Any fixed number: the same comparisons have the same interval.
        rng = np.random.default_rng(20260101)
        found = []
        for drawn in rng.integers(len(prompts), size=(resamples, len(prompts))):
            sample = [each for place in drawn for each in prompts[place]]
            # Where no length differs the regression has nothing to control, and fails.
            plain = fmean(each["preference"] - 1 for each in sample)
            found.append(plain if _as_long(sample) else self._win_rate(sample))
        return [float(end) for end in np.quantile(found, (0.025, 0.975))]

    def _win_rate(self, annotations: list[Annotation]) -> float:
        glm = _library()
        gamed = self._gamed or self._without_difficulties(annotations)
        # The library fetches this file from the hub, at whatever is there today.
        glm.hf_hub_download = lambda **_: str(gamed)
        with warnings.catch_warnings():
            # It warns of scikit-learn's next versions; constraints/eval.txt pins one that works.
            warnings.simplefilter("ignore", FutureWarning)
            found = glm.get_length_controlled_winrate(
                annotations,
                glm_name=self._name,
                save_weights_dir=None,
                is_add_glm_preference_inplace=False,
                is_warn_extreme_changes=False,
            )
        return float(found["length_controlled_winrate"]) / 100

    def _without_difficulties(self, annotations: list[Annotation]) -> Path:
        """The library's table for the minimal regression, which looks difficulties up in vain."""
        path = self._ctx.work / GAMED
        rows = "".join(f"none,{place},0.0\n" for place in range(len(annotations)))
        path.write_text(f"model,index,instruction_difficulty\n{rows}")
        return path


def _library() -> Any:
    """The module of the library's regression; UserError if the library is not installed."""
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
