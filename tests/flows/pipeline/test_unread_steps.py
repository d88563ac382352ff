"""Steps of a run whose inputs are not read: the same as with them, without their content."""

from flows.pipeline.algorithm import resolve_run, unread_steps
from flows.pipeline.loading import load_overridden
from stages.contract.request import FileInput
from tests.flows.loop import ROOT

QUICKSTART = ROOT / "configs/quickstart.yaml"
PROMPTS = ROOT / "data/quickstart/prompts.jsonl"


def without_content(source):
    return source.location if isinstance(source, FileInput) else source


def shown(step):
    inputs = {name: [*map(without_content, group)] for name, group in step.inputs.items()}
    # A promotion holds a digest of the oracle and of the prompts, which depends on their content.
    params = step.params.model_copy(update={"measured_by": ""})
    return step.name, params, inputs, step.seed


def test_unread_steps_equal_the_run_s(tmp_path):
    code = tmp_path / "oracle.py"
    code.write_text("def score(prompts, responses, references): ...\n")
    judged = {
        "oracle": "judge",
        "judge": {"mode": "pairwise", "model": "j", "url": "http://x/v1", "against": "reference"},
    }
    suites = {
        "own": {"prompts": str(PROMPTS), "after": "each"},
        "coded": {"prompts": str(PROMPTS), "score": {"oracle": "python"}, "oracle_code": str(code)},
        "judged": {"prompts": str(PROMPTS), "score": judged},
    }
    changes = {
        "iterations": 2,
        "screen": {"num_samples": 2},
        "inputs": {"test_prompts": str(PROMPTS)},
        "suites": suites,
    }
    config = load_overridden(QUICKSTART, changes, "test")
    steps = resolve_run(config).steps
    assert [*map(shown, unread_steps(config))] == [*map(shown, steps)]
