"""Parameters of the bandit stage.

The paper gives arms, iterations, rollouts and learning rate. Everything else it leaves open decides
the outcome (docs/bandit.md), so it is here: the landscape, the optimizer, clipping, ties, κ and β.
"""

from typing import ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from stages.contract.params import OutputSpec, Settings, StageParams

Method = Literal[
    "none", "feb", "selm", "xpo", "vpo", "se_popo", "one_minus_pi", "inverse_pi", "arctanh"
]
BanditDivergence = Literal["reverse_kl", "hellinger", "forward_kl"]


class LandscapeParams(Settings):
    """The arms: what the reference plays and what each arm pays."""

    num_arms: int = Field(1000, ge=2)
    """Arms."""
    reference_arm: int = Field(300, ge=0)
    """Centre of the reference's bump, and of the local optimum of the reward."""
    reference_width: float = Field(60.0, gt=0)
    """Standard deviation of the reference's bump, in arms."""
    reference_floor: float = Field(1e-6, gt=0)
    """Added to every arm's reference probability before normalising."""
    best_arm: int = Field(750, ge=0)
    """The arm that pays most, where the reference rarely goes."""
    reward_width: float = Field(60.0, gt=0)
    """Standard deviation of both bumps of the reward, in arms."""
    local_reward: float = Field(0.6, gt=0)
    """Reward at the local optimum."""
    best_reward: float = Field(1.0, gt=0)
    """Reward at the best arm."""

    @model_validator(mode="after")
    def _landscape_has_a_better_place(self) -> Self:
        if max(self.reference_arm, self.best_arm) >= self.num_arms:
            raise ValueError(
                f"reference_arm = {self.reference_arm} and best_arm = {self.best_arm} must be "
                f"among the {self.num_arms} arms, counted from 0"
            )
        if self.best_reward <= self.local_reward:
            raise ValueError(
                f"best_reward = {self.best_reward} must exceed local_reward = {self.local_reward}"
            )
        return self


class BanditParams(StageParams):
    """Methods compared on a bandit whose best arm lies where the reference rarely goes."""

    stage: ClassVar[str] = "bandit"
    version: ClassVar[str] = "2"
    outputs = {
        "metrics.json": OutputSpec("file"),
        "table.md": OutputSpec("file"),
        "*.png": OutputSpec("file"),
    }
    image = "torch"

    landscape: LandscapeParams = LandscapeParams()
    """The arms."""
    methods: tuple[Method, ...] = get_args(Method)
    """Exploratory bonuses to compare; `none` is f-DPO."""
    divergences: tuple[BanditDivergence, ...] = get_args(BanditDivergence)
    """Divergences; a method that is not defined under one is left out there."""
    kappas: tuple[float, ...] = (0.1, 1.0, 10.0)
    """Values of κ > 0, each a cell of its own; f-DPO has none."""
    numerics: Literal["exact", "paper"] = "exact"
    """`paper` uses the published code's ε forms."""
    bonus_on: Literal["rejected", "all", "chosen"] = "rejected"
    """Rollouts that get the bonus."""
    beta: float = Field(0.1, gt=0)
    """β of the preference loss."""
    num_seeds: int = Field(10, ge=1)
    """Repetitions. A repetition's random numbers are the same for every method."""
    num_iterations: int = Field(5000, ge=1)
    """Iterations: one batch of rollouts and one update of the policy each."""
    num_rollouts: int = Field(64, ge=2, multiple_of=2)
    """Rollouts per iteration; neighbours make a pair."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of the logits."""
    learning_rate: float = Field(1e-2, gt=0)
    """Learning rate, constant."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Each policy's gradient is scaled down to this norm; 0 never scales."""
    ties: Literal["keep", "drop"] = "keep"
    """Pairs of equal reward: only their bonus counts, or nothing of them."""
    reference: Literal["previous", "initial"] = "previous"
    """π_ref of an iteration: the policy that made its rollouts, or the one at the start."""
    record_every: int = Field(50, ge=1)
    """Iterations between two records of the best region; the precision of "found after"."""

    @model_validator(mode="after")
    def _something_to_compare(self) -> Self:
        for name in ("methods", "divergences", "kappas"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} = {list(values)} must be a list without repetitions")
        if min(self.kappas) <= 0.0:
            raise ValueError(
                f"kappas = {list(self.kappas)} must be positive: without a bonus it is the method "
                "'none'"
            )
        return self
