"""Values and gradients against mpmath (golden.py), over the whole registry."""

import json
import math

import golden
import pytest
import torch
from objective_cases import ALL_DIVERGENCES, BETA, DEFINED, bonus_of, evaluated

from stages.objectives.divergences import implicit_reward, reward_saturation

GOLDEN = json.loads(golden.GOLDEN_FILE.read_text())
RELATIVE_ERROR = {torch.float32: 1e-5, torch.float64: 1e-12}
DTYPES = pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=["float32", "float64"])


def divergence_of(name):
    return name if not name[0].isdigit() else float(name)


def case_id(case):
    return "-".join(str(case[k]) for k in ("design", "divergence", "probability") if k in case)


def assert_matches(actual, expected, dtype, clamped, what):
    """Relative error within bound; where the truth has no float, clamped or underflowed."""
    info = torch.finfo(dtype)
    for i, (have, text) in enumerate(zip(actual.tolist(), expected, strict=True)):
        want = float(text)
        assert math.isfinite(have), f"{what}[{i}] = {have}, want {text}"
        if clamped[i]:
            assert abs(want) > 0.999 * info.max or what == "gradient", (
                f"{what}[{i}] clamped at {text}"
            )
        elif abs(want) < info.tiny:
            assert abs(have) <= info.tiny, f"{what}[{i}] = {have}, want {text}"
        else:
            error = abs(have - want) / abs(want)
            assert error <= RELATIVE_ERROR[dtype], f"{what}[{i}] = {have}, want {text}: {error:.1e}"


@DTYPES
@pytest.mark.parametrize(
    "case", [c for c in GOLDEN["bonus"] if c["probability"] != "token"], ids=case_id
)
def test_summed_log_probs(case, dtype):
    rows = case["rows"]
    logp = torch.tensor(rows["logp"], dtype=dtype, requires_grad=True)
    arguments = {
        "design": case["design"],
        "divergence": divergence_of(case["divergence"]),
        "probability": case["probability"],
        "num_tokens": torch.tensor(rows["num_tokens"]),
        "ref_logp": torch.tensor(rows["ref_logp"], dtype=dtype),
    }
    bonus = evaluated(logp, **arguments)
    clamped, _ = bonus.saturation()
    (gradient,) = torch.autograd.grad(bonus.value.sum(), logp)
    assert_matches(bonus.value, rows["bonus"], dtype, clamped, "bonus")
    assert_matches(gradient, rows["gradient"], dtype, clamped, "gradient")
    assert (gradient[clamped] == 0).all()


@DTYPES
@pytest.mark.parametrize(
    "case", [c for c in GOLDEN["bonus"] if c["probability"] == "token"], ids=case_id
)
def test_token_log_probs(case, dtype):
    rows = case["rows"]
    longest = max(rows["num_tokens"])
    positions = range(longest)
    logp = torch.tensor([[golden.token_logp(t) for t in positions]] * len(rows["num_tokens"]))
    ref_logp = torch.tensor([[golden.token_ref_logp(t) for t in positions]] * len(logp))
    mask = torch.arange(longest) < torch.tensor(rows["num_tokens"])[:, None]
    # Padding neither moves the bonus nor poisons the gradient.
    logp[~mask] = float("-inf")
    ref_logp[~mask] = float("nan")
    leaf = logp.to(dtype).requires_grad_()
    bonus = bonus_of(
        leaf,
        design=case["design"],
        divergence=divergence_of(case["divergence"]),
        probability="token",
        mask=mask,
        ref_logp=ref_logp.to(dtype),
    )
    (gradient,) = torch.autograd.grad(bonus.sum(), leaf)
    never = [False] * 3
    assert_matches(bonus, rows["bonus"], dtype, never, "bonus")
    for row, (at, expected) in enumerate(zip(rows["positions"], rows["gradient"], strict=True)):
        assert_matches(gradient[row, at], expected, dtype, never, "gradient")
    assert (gradient[~mask] == 0).all()


@DTYPES
@pytest.mark.parametrize("case", GOLDEN["reward"], ids=case_id)
def test_implicit_reward(case, dtype):
    divergence = divergence_of(case["divergence"])
    logratio = torch.tensor(case["logratio"], dtype=dtype, requires_grad=True)
    reward = implicit_reward(logratio, divergence=divergence)
    (gradient,) = torch.autograd.grad(reward.sum(), logratio)
    clamped = reward_saturation(logratio, divergence=divergence)
    kept = [i for i, is_clamped in enumerate(clamped) if not is_clamped]
    never = [False] * len(kept)
    assert_matches(reward[kept], [case["reward"][i] for i in kept], dtype, never, "reward")
    assert_matches(gradient[kept], [case["gradient"][i] for i in kept], dtype, never, "gradient")
    limit = torch.finfo(dtype).max / 6001.0
    assert all(abs(float(case["reward"][i])) > limit for i in range(len(clamped)) if clamped[i])


def test_golden_file_covers_the_registry():
    assert GOLDEN["beta"] == BETA
    covered = {
        (c["design"], divergence_of(c["divergence"]), c["probability"]) for c in GOLDEN["bonus"]
    }
    expected_cases = {(*pair, p) for pair in DEFINED for p in ("sequence", "token_mean", "token")}
    assert covered == expected_cases
    rewards = {divergence_of(c["divergence"]) for c in GOLDEN["reward"]}
    assert rewards == set(ALL_DIVERGENCES)
