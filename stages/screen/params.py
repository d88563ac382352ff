"""Parameters of the screen stage."""

from typing import ClassVar

from pydantic import Field

from stages.contract.params import InputSpec, OutputSpec, StageParams


class ScreenParams(StageParams):
    """Drops the prompts that the starting policy solves, before anything is trained on them."""

    stage: ClassVar[str] = "screen"
    version: ClassVar[str] = "1"
    inputs = {
        "prompts": InputSpec(),
        "responses": InputSpec(many=True),
        "scores": InputSpec(many=True),
    }
    outputs = {
        "prompts.parquet": OutputSpec("prompts"),
        "metrics.json": OutputSpec("file"),
    }

    num_samples: int = Field(0, ge=0)
    """Samples of the starting policy for each prompt; 0 screens nothing. The paper's mathematics
    experiment takes 2."""
    solved_score: float = 1.0
    """A prompt is solved if a sample scores at least this, in the oracle's units."""
