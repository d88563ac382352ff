"""Golden bonuses, rewards and their gradients, from the definitions, at 50 digits or more.

    python tests/stages/objectives/golden.py      writes golden.json in this folder

The route differs from the code's: f and u are evaluated as the paper defines them, on
probabilities rather than in log space, by mpmath with as many digits as the smallest probability
needs; gradients are numerical derivatives of those. Inputs are float32 numbers, so that both
precisions see the same ones.
"""

import json
import struct
from functools import cache
from pathlib import Path

from mpmath import mp, mpf

GOLDEN_FILE = Path(__file__).with_name("golden.json")

ALPHA = {"reverse_kl": "1", "hellinger": "0.5", "forward_kl": "0", "0.25": "0.25", "0.75": "0.75"}
DIVERGENCES = (*ALPHA, "js")
BETA = 0.125

LOGPS = (-1e-6, -1e-3, -0.05, -0.4, -1.0, -3.0, -11.5, -50.0, -104.0, -400.0, -870.0, -2000.0)
LENGTHS = (1, 1, 2, 3, 2, 5, 8, 31, 64, 256, 777, 2048)
LOGRATIOS = (-400.0, -60.0, -10.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 10.0, 60.0, 400.0)
TOKEN_LENGTHS = (1, 16, 2048)
DIGITS = 50


def float32(value):
    """The float32 nearest to `value`."""
    return struct.unpack("f", struct.pack("f", value))[0]


def ref_logp_of(logp, index):
    """A reference log-probability whose logratio takes either sign and many sizes."""
    return float32(logp * (1.25 if index % 2 else 0.75) - 0.375)


def token_logp(position):
    """A token's log-probability, in (−5, 0): a multiple of 1/64."""
    return -((position * 37) % 301 + 1) / 64.0


def token_ref_logp(position):
    """The reference's: below the policy's at most positions, so that no mean cancels."""
    return token_logp(position) - ((position * 11) % 7 + 1) / 8.0


def f_and_derivative(divergence, u):
    """f(u) and f′(u) of Definition 3.2 with α(α−1), or of the Jensen–Shannon divergence."""
    if divergence == "js":
        return u * mp.log(u) - (1 + u) * mp.log((1 + u) / 2), mp.log(2 * u / (1 + u))
    alpha = mpf(ALPHA[divergence])
    if alpha == 1:
        return u * mp.log(u) - u + 1, mp.log(u)
    if alpha == 0:
        return -mp.log(u) + u - 1, 1 - 1 / u
    scale = alpha * (alpha - 1)
    return (u**alpha - alpha * u - (1 - alpha)) / scale, alpha * (u ** (alpha - 1) - 1) / scale


def gain(divergence, u):
    """u f′(u) − f(u), Eq. 11."""
    f, derivative = f_and_derivative(divergence, u)
    return u * derivative - f


def alpha_of(divergence):
    return mpf(ALPHA[divergence])


BONUSES = {
    "none": lambda divergence, pi, ref: mpf(0),
    "one_minus_pi": lambda divergence, pi, ref: gain(divergence, 1 + alpha_of(divergence) - pi),
    "inverse_pi": lambda divergence, pi, ref: gain(divergence, 1 / pi),
    "arctanh": lambda divergence, pi, ref: gain(
        divergence, mp.atanh(1 - pi) + alpha_of(divergence)
    ),
    "feb": lambda divergence, pi, ref: gain(divergence, pi / ref),
    "selm": lambda divergence, pi, ref: -mpf(BETA) * mp.log(pi / ref),
    "xpo": lambda divergence, pi, ref: -mp.log(pi),
    "vpo": lambda divergence, pi, ref: -mp.log(pi / ref),
    "se_popo": lambda divergence, pi, ref: (
        -(1 / (1 + (pi / ref) ** (-mpf(BETA))) - mpf(1) / 2) / mpf(BETA)
    ),
}
"""(divergence, π, π_ref) → bonus."""

DEFINED_UNDER = {
    "none": DIVERGENCES,
    "one_minus_pi": tuple(ALPHA),
    "inverse_pi": DIVERGENCES,
    "arctanh": tuple(ALPHA),
    "feb": DIVERGENCES,
    **dict.fromkeys(("selm", "xpo", "vpo", "se_popo"), ("reverse_kl",)),
}


@cache
def bonus_and_gradient(design, divergence, logp, ref_logp):
    """Bonus and d bonus/d log π at one log-probability."""
    digits = DIGITS + int(1.5 * max(abs(logp), abs(ref_logp)))
    with mp.workdps(digits):

        def bonus(log_pi):
            return BONUSES[design](divergence, mp.exp(log_pi), mp.exp(mpf(ref_logp)))

        return bonus(mpf(logp)), mp.diff(bonus, mpf(logp))


def text(value):
    return mp.nstr(value, 20)


def summed_rows(design, divergence, probability):
    """Golden rows of probability "sequence" or "token_mean"."""
    rows = {name: [] for name in ("logp", "ref_logp", "num_tokens", "bonus", "gradient")}
    for index, (value, length) in enumerate(zip(LOGPS, LENGTHS, strict=True)):
        logp = float32(value)
        ref_logp = ref_logp_of(logp, index)
        divisor = length if probability == "token_mean" else 1
        with mp.workdps(DIGITS + 1000):
            bonus, slope = bonus_and_gradient(
                design, divergence, mpf(logp) / divisor, mpf(ref_logp) / divisor
            )
            rows["gradient"].append(text(slope / divisor))
        rows["logp"].append(logp)
        rows["ref_logp"].append(ref_logp)
        rows["num_tokens"].append(length)
        rows["bonus"].append(text(bonus))
    return rows


def token_rows(design, divergence):
    """Golden rows of probability "token": the mean bonus, and gradients at three positions."""
    rows = {name: [] for name in ("num_tokens", "positions", "bonus", "gradient")}
    for length in TOKEN_LENGTHS:
        numbers = [
            bonus_and_gradient(design, divergence, mpf(token_logp(t)), mpf(token_ref_logp(t)))
            for t in range(length)
        ]
        positions = sorted({0, length // 2, length - 1})
        rows["num_tokens"].append(length)
        rows["positions"].append(positions)
        rows["bonus"].append(text(sum(value for value, _ in numbers) / length))
        rows["gradient"].append([text(numbers[t][1] / length) for t in positions])
    return rows


def bonus_cases():
    for design, divergences in DEFINED_UNDER.items():
        for divergence in divergences:
            case = {"design": design, "divergence": divergence}
            for probability in ("sequence", "token_mean"):
                rows = summed_rows(design, divergence, probability)
                yield {**case, "probability": probability, "rows": rows}
            yield {**case, "probability": "token", "rows": token_rows(design, divergence)}


def reward_of(divergence, logratio):
    return f_and_derivative(divergence, mp.exp(logratio))[1]


def reward_cases():
    for divergence in DIVERGENCES:
        logratios = [float32(value) for value in LOGRATIOS]
        with mp.workdps(800):
            rewards = [reward_of(divergence, mpf(value)) for value in logratios]
            slopes = [mp.diff(lambda x, d=divergence: reward_of(d, x), mpf(v)) for v in logratios]
        yield {
            "divergence": divergence,
            "logratio": logratios,
            "reward": [text(value) for value in rewards],
            "gradient": [text(value) for value in slopes],
        }


def make():
    mp.dps = DIGITS
    return {
        "made_by": "python tests/stages/objectives/golden.py",
        "beta": BETA,
        "bonus": list(bonus_cases()),
        "reward": list(reward_cases()),
    }


if __name__ == "__main__":
    GOLDEN_FILE.write_text(json.dumps(make(), indent=None, separators=(",", ":")) + "\n")
