"""Parameters of the train stage. Defaults are those of the paper's published code."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from stages.contract.params import Settings, added_later, speed_only
from stages.contract.signature import InputSpec, OutputSpec
from stages.training.params import TrainingParams

Divergence = (
    Annotated[Literal["reverse_kl", "hellinger", "forward_kl", "js"], Field(title="name")]
    | Annotated[float, Field(ge=0, le=1, title="α")]
)


class ObjectiveParams(Settings):
    """Loss of a batch: the mean over its pairs of L − κ · L_bonus + nll_weight · NLL.

    The preference term L of a tied pair is zero; its bonus and NLL count.
    """

    divergence: Divergence = "reverse_kl"
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
    label_smoothing: float = Field(0.0, ge=0, le=0.5)
    """Probability that a preference label is wrong."""
    bonus_on: Literal["rejected", "all", "chosen"] = "rejected"
    """Responses that get the bonus; `all` is the mean of a pair's two bonuses."""
    nll_weight: float = Field(0.0, ge=0)
    """Weight of the chosen response's negative log-likelihood per token."""
    length_normalised: bool = added_later(False)
    """Preference loss on log-ratios per token, as in length-normalised DPO: a longer response gains
    nothing by its length. β then wants to be larger by about the length of a response."""


DEFAULT_KAPPA = 1.0


class KappaParams(Settings):
    """κ, the weight of the bonus."""

    kappa: float | None = Field(None, ge=0, allow_inf_nan=False)
    """κ at the start of an iteration. Unset it is 1, or what `target_ratio` calibrates."""
    kappa_schedule: Literal["constant", "linear", "cosine", "per_iteration"] = "constant"
    """`linear` and `cosine` let κ fall over an iteration; `per_iteration` takes `kappa_values`."""
    kappa_final_fraction: float = Field(0.0, ge=0, le=1)
    """Share of κ that a falling schedule leaves at the last step."""
    kappa_values: tuple[float, ...] = ()
    """κ of iterations 1, 2, … under `per_iteration`; the last one stays."""
    target_ratio: float | None = Field(None, gt=0)
    """Wanted |κ · bonus| / |L|: κ is set from the first batches, in place of `kappa`. Without a
    bonus (`design: none`) nothing is calibrated."""
    calibration_batches: int = Field(8, ge=1)
    """Global batches that set κ if a target ratio is wanted."""

    def kappa_or_default(self) -> float:
        """κ at the start of an iteration, before a calibration multiplies it."""
        return DEFAULT_KAPPA if self.kappa is None else self.kappa

    def result_fields(self) -> dict[str, Any]:
        """Settings that enter the key; an unset κ as the number that it stands for."""
        return super().result_fields() | {"kappa": self.kappa_or_default()}

    @model_validator(mode="after")
    def _kappa_is_given_or_calibrated(self) -> Self:
        given = [
            name for name in ("kappa", "kappa_values") if getattr(self, name) not in (None, ())
        ]
        if self.target_ratio is not None and given:
            raise ValueError(
                f"{given[0]} = {getattr(self, given[0])} and target_ratio = {self.target_ratio} "
                "exclude each other: κ is given, or calibrated to the ratio; unset one of them "
                "(`train.kappa: null` or `train.target_ratio: null`)"
            )
        return self

    @model_validator(mode="after")
    def _values_belong_to_per_iteration(self) -> Self:
        if (self.kappa_schedule == "per_iteration") != bool(self.kappa_values):
            raise ValueError(
                f"kappa_values = {list(self.kappa_values)} with kappa_schedule = "
                f"{self.kappa_schedule!r}: values belong to 'per_iteration', "
                "which needs at least one"
            )
        return self


class LengthParams(Settings):
    """Limits of length. Rows beyond them are counted in `summary.json`, and a warning says so."""

    max_length_tokens: int = Field(2048, ge=2)
    """Most tokens of a prompt with one response."""
    max_prompt_tokens: int = Field(1000, ge=1)
    """Tokens to which the prompt of an over-long pair is cut."""
    over_length: Literal["truncate", "drop"] = "truncate"
    """`truncate`: an over-long pair keeps its prompt's last and its responses' first tokens."""

    @model_validator(mode="after")
    def _lengths_leave_room_for_a_response(self) -> Self:
        if self.max_prompt_tokens >= self.max_length_tokens:
            raise ValueError(
                f"max_prompt_tokens = {self.max_prompt_tokens} leaves no room for a response "
                f"within max_length_tokens = {self.max_length_tokens}"
            )
        return self


class TrainParams(TrainingParams, LengthParams, KappaParams, ObjectiveParams):
    """Trains a policy on preference pairs by f-DPO with an exploratory bonus.

    Inputs: `policy` (model to start from), `reference` (model of π_ref), `pairs` (1..n tables), and
    `adapter` and `reference_adapter`, LoRA adapters on the two. Outputs: `checkpoint/`,
    `reference_logprobs.parquet`, `summary.json`, `metrics.jsonl`, and with `reference = "ema"` also
    `ema/`, the next iteration's reference; with `lora.save = "both"` also `adapter/`. With
    `lora.save = "adapter"` the checkpoint is an adapter over `policy`.
    """

    stage: ClassVar[str] = "train"
    version: ClassVar[str] = "1"
    inputs = {
        "policy": InputSpec("model"),
        "reference": InputSpec("model"),
        "pairs": InputSpec("pairs", many=True),
        "adapter": InputSpec("model", optional=True),
        "reference_adapter": InputSpec("model", optional=True),
    }
    outputs = {
        "checkpoint": OutputSpec("model"),
        "adapter": OutputSpec("model", optional=True),
        "ema": OutputSpec("model", optional=True),
        "reference_logprobs.parquet": OutputSpec("file"),
        "summary.json": OutputSpec("file"),
        "metrics.jsonl": OutputSpec("file"),
    }
    image = "torch"
    late_modules = ("stages.train.fit", "deepspeed", "peft")

    iteration: int = Field(1, ge=1)
    """Iteration of the run, from 1; chooses κ under a per-iteration schedule."""
    global_batch_pairs: int = Field(256, ge=1)
    """Pairs per optimizer step, over all processes. An epoch's last batch may be smaller."""
    reference: Literal["previous", "initial", "ema"] = "previous"
    """Whose model the `reference` input is; `ema` also writes the moved average."""
    ema_decay: float = Field(0.9, ge=0, le=1)
    """Share of the old reference that stays in the average per iteration."""
    reference_logprobs: Literal["model", "sampler"] = "model"
    """`model` computes log π_ref in the policy's numerics; `sampler` takes the sampler's own."""
    save_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the saved weights; `auto` keeps the starting checkpoint's."""
    validation_share: float = added_later(0.0, ge=0, lt=1)
    """Share of the prompts whose pairs are kept from the updates. Their preference loss, accuracy
    and margin are measured during training; 0 trains on all pairs."""
    validation_every_steps: int | None = speed_only(None, ge=1)
    """Steps between measurements of the validation pairs; unset, those of an epoch. They are
    measured after the last step always."""

    @model_validator(mode="after")
    def _average_is_of_whole_models(self) -> Self:
        if self.lora.save == "adapter" and self.reference == "ema":
            raise ValueError(
                "reference = 'ema' with lora.save = 'adapter': the average of two policies is no "
                "adapter of their rank; set lora.save to 'merged', or reference to 'previous'"
            )
        return self

    @model_validator(mode="after")
    def _sampler_is_the_reference(self) -> Self:
        if self.reference_logprobs == "sampler" and self.reference != "previous":
            raise ValueError(
                f"reference_logprobs = 'sampler' with reference = {self.reference!r}: the sampler "
                "is the previous iteration's policy, so that the reference would be ignored; set "
                "reference_logprobs to 'model', or reference to 'previous'"
            )
        return self
