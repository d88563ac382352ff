"""Custom objectives, which docs/research.md walks through."""

import torch.nn.functional as F

# e^20 ends any comparison, and its square still has a float.
LARGEST_EXPONENT = 20.0


def chi_po(chosen, rejected, beta=0.1, largest_reward=10.0):
    """χPO's loss of each pair (arXiv 2407.13399, Eq. 8); `logratio` of each side is [B].

    L = −log σ(clip_{2R}(β φ(π/π_ref)(y_w) − β φ(π/π_ref)(y_l))),   φ(u) = u + log u

    β weighs a mixture of χ² and KL divergence, R bounds the rewards.
    """
    link = [
        side.logratio.clamp(max=LARGEST_EXPONENT).exp() + side.logratio
        for side in (chosen, rejected)
    ]
    margin = (beta * (link[0] - link[1])).clamp(-2 * largest_reward, 2 * largest_reward)
    return {"loss": -F.logsigmoid(margin)}


def rebel(chosen, rejected, beta=0.1, scale=1.0):
    """REBEL's loss of each pair (arXiv 2404.16767, Eq. 1): the margin follows the oracle's scores.

    L = (β (log π/π_ref(y_w) − log π/π_ref(y_l)) − η (r(y_w) − r(y_l)))²,   η is ``scale``
    """
    margin = beta * (chosen.logratio - rejected.logratio)
    return {"loss": (margin - scale * (chosen.score - rejected.score)) ** 2}
