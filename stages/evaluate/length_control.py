"""Length-controlled win rate by AlpacaEval's own regression (Dubois et al. 2024, arXiv 2404.04475).

Runs if ``alpaca_eval`` is installed: the environment and the image `eval`, which have no torch.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from stages.contract.errors import UserError
from stages.evaluate.params import EvaluateParams
from stages.evaluate.summary import Metrics
from stages.harness.context import StageContext
from stages.tables.join import read_scored

NAME = "length_controlled_win_rate"
GAMED = "df_gamed.csv"
BASELINE = "alpaca_eval_gpt4_baseline.json"
"""Files of the hub's data set `tatsu-lab/alpaca_eval` that the regression needs."""
# Folds of the library's cross-validation.
_FEWEST = 5


def length_controlled(ctx: StageContext[EvaluateParams]) -> Metrics:
    """The win rates that policy and base would have if all answers were as long as the baseline's.

    Scores are a judge's, from 0 (lost) to 1 (won against the baseline's answer).

    Returns:
        ``length_controlled_win_rate`` from 0 to 1, and the base's as ``base_…``; None if the
        lengths of all answers differ by the same number from the baseline's.

    Raises:
        UserError: The library or its data is missing, there are too few comparisons, or the scores
            are not comparisons.
    """
    glm = _library()
    folder = ctx.path("length_control")
    for name in (GAMED, BASELINE):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no file {name}, which AlpacaEval's regression needs",
                f"hf download tatsu-lab/alpaca_eval {GAMED} {BASELINE} --repo-type dataset "
                f"--local-dir {folder}",
            )
    # The library fetches this file from the hub otherwise.
    glm.hf_hub_download = lambda **_: str(folder / GAMED)
    rows = json.loads((folder / BASELINE).read_text())
    # The first of equal instructions.
    places = {row["instruction"]: place for place, row in reversed(list(enumerate(rows)))}
    return {
        f"{prefix}{NAME}": _win_rate(glm, list(_annotations(ctx, prefix, places)))
        for prefix in ("", "base_")
    }


def _annotations(
    ctx: StageContext[EvaluateParams], prefix: str, places: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Comparisons in AlpacaEval's format: preference 1 the first output, 2 the second."""
    columns = ("messages", "response", "reference_answer")
    files = ctx.paths(f"{prefix}responses"), ctx.paths(f"{prefix}scores")
    for batch in read_scored(*files, columns=columns):
        rows = batch.responses.to_pylist()
        for row, score in zip(rows, batch.scores.to_pylist(), strict=True):
            if score is None or row["reference_answer"] is None:
                continue
            if not 0 <= score <= 1:
                raise UserError(
                    f"evaluate.length_controlled is set, and a score is {score:g}: a length-"
                    "controlled win rate needs comparisons, from 0 (lost) to 1 (won)",
                    "use the oracle judge with judge.mode pairwise, or leave it off",
                )
            instruction = row["messages"][-1]["content"]
            if instruction not in places:
                raise UserError(
                    f"the prompt {instruction[:80]!r} is not one of AlpacaEval's",
                    "evaluate on AlpacaEval's prompts, or set evaluate.length_controlled to false",
                )
            yield {
                "index": places[instruction],
                "instruction": instruction,
                "generator_1": "opponent",
                "generator_2": "model",
                "output_1": row["reference_answer"],
                "output_2": row["response"],
                "preference": 1 + score,
                "annotator": "judge",
            }


def _win_rate(glm: Any, annotations: list[dict[str, Any]]) -> float | None:
    if len(annotations) < _FEWEST:
        raise UserError(
            f"{len(annotations)} comparisons are too few for a length-controlled win rate",
            f"evaluate on at least {_FEWEST} prompts whose responses have scores",
        )
    differences = {len(row["output_2"]) - len(row["output_1"]) for row in annotations}
    if len(differences) == 1:
        return None
    with warnings.catch_warnings():
        # It warns of scikit-learn's next versions; constraints/eval.txt pins one that works.
        warnings.simplefilter("ignore", FutureWarning)
        result = glm.get_length_controlled_winrate(
            annotations,
            save_weights_dir=None,
            is_add_glm_preference_inplace=False,
            is_warn_extreme_changes=False,
        )
    return float(result["length_controlled_winrate"]) / 100


def _library() -> Any:
    """The module of the library's regression; UserError if the library is not installed."""
    try:
        from alpaca_eval.metrics import glm_winrate
    except ImportError as error:
        raise UserError(
            f"evaluate.length_controlled needs AlpacaEval's own code ({error})",
            "run `make setup-eval`, and set execution.interpreters.eval to .venv-eval/bin/python",
        ) from error
    # It sets up logging.
    logging.getLogger("alpaca_eval").setLevel(logging.ERROR)
    return glm_winrate
