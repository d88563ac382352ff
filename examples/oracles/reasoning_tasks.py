"""A task of reasoning-gym: its prompts as JSON lines, and its own scorer as an oracle.

    .venv-eval/bin/python examples/oracles/reasoning_tasks.py ransom_note size=1000 > prompts.jsonl

The oracle needs `make setup-eval`. Some scorers evaluate an answer as Python: run them in a
container. The end of the stage ends a scorer that goes on.
"""

import json
import random
import sys

from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer


def score(prompts, responses, references):
    """Scores each response by its task's scorer, partial credit included."""
    return [check(*row) for row in zip(responses, references, strict=True)]


def check(response, reference):
    """Score of one response; an answer that breaks its scorer has 0."""
    task = json.loads(reference)
    dataset = create_dataset(task["name"], **task["settings"])
    tagged = extract_answer(response)
    try:
        return float(dataset.score_answer(tagged or response.strip(), task["entry"]))
    except Exception:
        return 0.0


def main():
    """Prints a row for `inputs.prompts` for each entry of the task that the command line names."""
    name, *assignments = sys.argv[1:]
    settings = {"seed": 0}
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        settings[key] = json.loads(value)
    random.seed(settings["seed"])
    for entry in create_dataset(name, **settings):
        task = {"name": name, "settings": settings, "entry": entry}
        row = {"prompt": entry["question"], "reference_answer": json.dumps(task)}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
