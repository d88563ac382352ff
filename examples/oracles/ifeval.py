"""IFEval as an oracle: 1 if a response follows all instructions of its prompt (arXiv 2311.07911).

lm-eval's checkers decide, by the strict prompt-level accuracy. They need `make setup-eval`, and
nltk's data: `.venv-eval/bin/python -m nltk.downloader punkt_tab`.

The reference answer of a prompt is a JSON object with `instruction_id_list` and `kwargs`, as
`prepare.reference_columns: [instruction_id_list, kwargs]` makes it of `google/IFEval`.
"""

import json
import random

from langdetect import DetectorFactory
from lm_eval.tasks.ifeval.utils import process_results

DetectorFactory.seed = 0


def score(prompts, responses, references):
    """Scores each response; components are the shares of instructions, strict and loose."""
    return [check(*row) for row in zip(prompts, responses, references, strict=True)]


def check(messages, response, reference):
    """Score and components of one response."""
    instructions = json.loads(reference)
    prompt = messages[-1]["content"]
    # Checkers without arguments draw them.
    random.seed(prompt)
    document = {
        "key": 0,
        "prompt": prompt,
        "instruction_id_list": instructions["instruction_id_list"],
        "kwargs": [arguments or {} for arguments in instructions["kwargs"]],
    }
    results = process_results(document, [response])
    strict = results["inst_level_strict_acc"]
    loose = results["inst_level_loose_acc"]
    return {
        "score": float(results["prompt_level_strict_acc"]),
        "instructions_strict": sum(strict) / len(strict),
        "instructions_loose": sum(loose) / len(loose),
    }
