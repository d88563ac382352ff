"""Settings of the estimate: hardware, price, and what is assumed of data that is not there yet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.contract.params import Settings


class Estimation(Settings):
    """Assumptions of `geb plan --estimate` (docs/planning.md). They change no result and no key."""

    hardware: Literal["a100-40gb", "a100-80gb", "h100", "h200"] = "h100"
    """GPU of the stages that have `resources.….gpus`; stages without run on this machine's CPU."""
    price_per_gpu_hour: float | None = Field(None, ge=0)
    """Price of an hour of one GPU, in any currency; unset leaves money out."""
    prompts_per_iteration: int | None = Field(None, ge=1)
    """Prompts of an iteration where neither `prepare` nor a local file tells their number."""
    prompt_tokens: int | None = Field(None, ge=1)
    """Mean length of a prompt in tokens; unset takes a quarter of the bytes of a row of the local
    files, or 256 where there are none."""
    training_efficiency: float | None = Field(None, gt=0, le=1)
    """Share of the hardware's matrix-product rate that training reaches, recomputation counted;
    unset takes 0.4 on a GPU, 0.55 on a CPU."""
