"""Settings of the objective and of κ. Defaults are the paper's published code's."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from stages.contract.params import Settings

DivergenceName = (
    Annotated[Literal["reverse_kl", "hellinger", "forward_kl", "js"], Field(title="name")]
    | Annotated[float, Field(ge=0, le=1, title="α")]
)


ALPHA_DESIGNS = ("one_minus_pi", "arctanh")
"""Designs of GEB whose u contains α."""
REVERSE_KL_DESIGNS = ("selm", "xpo", "vpo", "se_popo")
"""Baselines derived from r = β log(π/π_ref), which holds under reverse KL only (Appendix A.3)."""
PUBLISHED_DIVERGENCES = ("reverse_kl", 1.0, "hellinger", 0.5, "forward_kl", 0.0)
"""The α-divergences that have a name, each also as its α; the published code has no other."""


def undefined(design: str, divergence: str | float, numerics: str = "exact") -> str | None:
    """Why the bonus does not exist under the divergence, with the remedy, or None if it does."""
    is_alpha = not isinstance(divergence, str) or divergence in PUBLISHED_DIVERGENCES
    if design in ALPHA_DESIGNS and not is_alpha:
        return f"its u contains α, and {divergence} has none; choose another divergence"
    if design in REVERSE_KL_DESIGNS and divergence not in ("reverse_kl", 1.0):
        return (
            "it is derived from r = β log(π/π_ref), which holds under reverse_kl only "
            "(paper, Appendix A.3); set divergence to 'reverse_kl'"
        )
    is_geb = design in (*ALPHA_DESIGNS, "inverse_pi")
    if numerics == "paper" and is_geb and divergence not in PUBLISHED_DIVERGENCES:
        return (
            "numerics is 'paper', and the published code has no form of it: it covers reverse_kl, "
            "hellinger and forward_kl; set numerics to 'exact'"
        )
    return None


class ObjectiveParams(Settings):
    """Loss of a batch: the mean over its pairs of L − κ · L_bonus + nll_weight · NLL.

    The preference term L of a tied pair is zero; its bonus and NLL count.
    """

    divergence: DivergenceName = "reverse_kl"
    """`reverse_kl`, `hellinger`, `forward_kl`, `js`, or α of an α-divergence in [0, 1]."""
    design: Literal[
        "none", "one_minus_pi", "inverse_pi", "arctanh", "feb", "selm", "xpo", "vpo", "se_popo"
    ] = "one_minus_pi"
    """The exploratory bonus; `none` is plain f-DPO."""
    probability: Literal["sequence", "token_mean", "token"] = "sequence"
    """π in the bonus: of the sequence, its geometric mean per token, or of each token."""
    numerics: Literal["exact", "paper"] = "exact"
    """`paper` uses the published code's ε forms."""
    beta: float = Field(0.1, gt=0)
    """β of the preference loss."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """Preference loss of the margin: f-DPO's `sigmoid`, or `ipo`."""
    label_smoothing: float = Field(0.0, ge=0, le=0.5)
    """Probability that a preference label is wrong."""
    bonus_on: Literal["rejected", "all", "chosen"] = "rejected"
    """Responses that get the bonus; `all` is the mean of a pair's two bonuses."""
    nll_weight: float = Field(0.0, ge=0)
    """Weight of the chosen response's negative log-likelihood per token."""
    length_normalised: bool = False
    """Preference loss on log-ratios per token, as in length-normalised DPO: a longer response gains
    nothing by its length. β then wants to be larger by about the length of a response."""

    @model_validator(mode="after")
    def _bonus_is_defined(self) -> Self:
        reason = undefined(self.design, self.divergence, self.numerics)
        if reason:
            raise ValueError(f"design {self.design!r} under {self.divergence!r}: {reason}")
        return self


class KappaParams(Settings):
    """κ, the weight of the bonus."""

    kappa: float | None = Field(None, ge=0)
    """κ. Unset it is 1, or the value that `target_ratio` calibrates."""
    target_ratio: float | None = Field(None, gt=0)
    """|κ · bonus| / |L|: the first eight batches set κ, in place of `kappa`. Without a
    bonus (`design: none`) nothing is calibrated."""

    def kappa_or_default(self) -> float:
        """κ where it is not calibrated."""
        return 1.0 if self.kappa is None else self.kappa

    def result_fields(self) -> dict[str, Any]:
        """Settings that enter the key; an unset κ as its number."""
        return super().result_fields() | {"kappa": self.kappa_or_default()}

    @model_validator(mode="after")
    def _kappa_has_one_source(self) -> Self:
        if self.target_ratio is not None and self.kappa is not None:
            raise ValueError(
                f"kappa = {self.kappa} and target_ratio = {self.target_ratio} exclude each other: "
                "κ is given, or calibrated to the ratio; unset one of them (`train.kappa: null` or "
                "`train.target_ratio: null`)"
            )
        return self
