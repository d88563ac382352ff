"""The paper's settings, field by field, in the configurations of its experiments."""

import re

import pytest

from flows.pipeline.loading import load_config
from tests.flows.loop import ROOT

FOLDER = ROOT / "configs/paper"
MATH = sorted(FOLDER.glob("math-*.yaml"))
MAIN = sorted(set(FOLDER.glob("*.yaml")) - set(MATH))

# Appendix "Implementation Details" of the paper; where it is silent, its published code.
SHARED = {
    "iterations": 3,
    "pair_data": "current",
    # Two responses to a prompt at temperature 1, at most 2048 tokens each, in a context of 8192.
    "generate.temperature": 1.0,
    "generate.top_p": 1.0,
    "generate.max_new_tokens": 2048,
    "generate.max_length_tokens": 8192,
    # The two are ranked by reward; ties are dropped.
    "pair.strategy": "best_worst",
    "pair.ties": "drop",
    # The published forms of the bonus, summed over the rejected response, without a factor β.
    "train.numerics": "paper",
    "train.probability": "sequence",
    "train.bonus_on": "rejected",
    "train.nll_weight": 0.0,
    "train.beta": 0.1,
    # A new AdamW and schedule in each iteration.
    "train.epochs": 2,
    "train.learning_rate": 5e-7,
    "train.lr_schedule": "cosine",
    # Two GPUs · 2 pairs · 64 accumulations.
    "train.global_batch_pairs": 256,
    "train.max_length_tokens": 2048,
    "train.max_prompt_tokens": 1000,
    "train.precision": "bfloat16",
    "train.gradient_checkpointing": True,
    "train.deepspeed.zero_stage": 3,
    "train.reference": "previous",
    "train.lora.rank": 0,
    "evaluation.num_samples": 64,
    "evaluation.temperature": 0.6,
    "evaluation.top_p": 0.9,
    "evaluation.max_new_tokens": 4096,
}
MAIN_SETTINGS = SHARED | {
    "inputs.prompts": (
        "RLHFlow/ultrafeedback_iter1",
        "RLHFlow/ultrafeedback_iter2",
        "RLHFlow/ultrafeedback_iter3",
    ),
    "inputs.test_prompts": "RLHFlow/test_generation_2k",
    "inputs.oracle_model": "LxzGordon/URM-LLaMa-3.1-8B",
    "inputs.warm_start": None,
    "prepare.messages_column": "context_messages",
    "screen.num_samples": 0,
    "generate.num_samples": 2,
    "score.oracle": "urm_helpfulness",
    "train.warmup_ratio": 0.03,
}
MATH_SETTINGS = SHARED | {
    "inputs.policy": "Qwen/Qwen2.5-7B",
    "inputs.prompts": ("BytedTsinghua-SIA/DAPO-Math-17k",),
    "inputs.oracle_model": None,
    # Prompts that the reference solves within two samples are left out.
    "screen.num_samples": 2,
    "score.oracle": "math_verify",
    "train.divergence": "reverse_kl",
    "train.warmup_ratio": 0.1,
    "train.target_ratio": None,
}

POLICIES = {"llama3": "RLHFlow/LLaMA3-SFT", "mistral": "mistralai/Mistral-7B-Instruct-v0.3"}
DIVERGENCES = {"kl": "reverse_kl", "hellinger": "hellinger", "fkl": "forward_kl"}
# The paper chooses κ by |κ · bonus| / |L|, which works between 1e-6 and 1e-2.
DESIGNS = {
    "fdpo": {"train.design": "none", "train.target_ratio": None},
    "geb-p": {"train.design": "one_minus_pi", "train.target_ratio": 1e-3},
    "geb-inverse": {"train.design": "inverse_pi", "train.target_ratio": 1e-3},
    "geb-arctanh": {"train.design": "arctanh", "train.target_ratio": 1e-3},
}
# The bonuses of earlier work. FEB, SELM and VPO are zero at π = π_ref, where training starts: no
# ratio can be calibrated, and κ is set, to the value in the authors' code if it has one.
BASELINES = {
    "feb": {"train.design": "feb", "train.kappa": 1e-2, "train.target_ratio": None},
    "selm": {"train.design": "selm", "train.kappa": 1e-3, "train.target_ratio": None},
    "xpo": {"train.design": "xpo", "train.kappa": 1e-5, "train.target_ratio": None},
    "vpo": {"train.design": "vpo", "train.kappa": 1e-2, "train.target_ratio": None},
}
# SELM, XPO and VPO do not extend beyond the KL divergence; the paper reports them there only.
ONLY_KL = ("selm", "xpo", "vpo")
MATH_DESIGNS = {
    "math-fdpo": {"train.design": "none", "train.kappa": 0.0},
    "math-geb-p": {"train.design": "one_minus_pi", "train.kappa": 50.0},
    "math-geb-inverse": {"train.design": "inverse_pi", "train.kappa": 5e-2},
    "math-geb-arctanh": {"train.design": "arctanh", "train.kappa": 5e-6},
}


def settings(config, names):
    """The values of a configuration at dotted names."""
    values = {}
    for name in names:
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        values[name] = value
    return values


def test_the_paper_s_experiments_are_complete():
    assert {path.stem for path in MAIN} == {
        f"{model}-{method}-{divergence}"
        for model in POLICIES
        for method in DESIGNS | BASELINES
        for divergence in DIVERGENCES
        if method not in ONLY_KL or divergence == "kl"
    }
    assert len(MAIN) == 36
    assert {path.stem for path in MATH} == set(MATH_DESIGNS)


@pytest.mark.parametrize("path", MAIN, ids=lambda path: path.stem)
def test_a_main_experiment_has_the_paper_s_settings(path):
    model, _, rest = path.stem.partition("-")
    method, _, divergence = rest.rpartition("-")
    # Under KL the paper's FEB is f-DPO (Lemma 3.1), and has its figures to the digit.
    preset = "fdpo" if (method, divergence) == ("feb", "kl") else method
    expected = MAIN_SETTINGS | (DESIGNS | BASELINES)[preset]
    expected |= {"inputs.policy": POLICIES[model], "train.divergence": DIVERGENCES[divergence]}
    assert settings(load_config(path), expected) == expected


@pytest.mark.parametrize("path", MATH, ids=lambda path: path.stem)
def test_a_mathematics_experiment_has_the_paper_s_settings(path):
    expected = MATH_SETTINGS | MATH_DESIGNS[path.stem]
    assert settings(load_config(path), expected) == expected


@pytest.mark.parametrize("path", MATH, ids=lambda path: path.stem)
def test_a_mathematics_experiment_reports_pass_at_16(path):
    config = load_config(path)
    evaluations = {name: config.for_suite(name).evaluation for name in config.suites}
    samples = {name: evaluation.num_samples for name, evaluation in evaluations.items()}
    # On AIME the paper's figures are not multiples of 1/30: there were more samples than 16.
    assert samples == {"math500": 16, "aime2025": 64, "olympiadbench": 16}
    for name, suite in config.suites.items():
        _, _, commit = suite.prompts.partition("@")
        assert name == "olympiadbench" or re.fullmatch("[0-9a-f]{40}", commit), "a branch moves"
        assert suite.score is None, "the verifier that the run trains with"
        assert (evaluations[name].temperature, evaluations[name].top_p) == (0.6, 0.9)
        assert (evaluations[name].correct_from, evaluations[name].pass_at_k) == (1.0, (1, 16))
