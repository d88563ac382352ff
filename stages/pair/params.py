"""Parameters of the pair stage."""

from typing import ClassVar, Literal

from pydantic import Field

from stages.contract.params import InputSpec, OutputSpec, OwnFunction, StageParams

# Above it, training learns hardly any preference.
_MOST_TIES = 0.9
Strategy = Literal["best_worst", "best_random", "first_two"]


class OwnStrategy(OwnFunction):
    """Choice of the two responses by a function of a Python file."""

    function: str = "select"
    """Name of the function in ``code``, `(responses, seed, **settings) -> (i, j)`: the places of
    two responses to compare, of which the better scored one is the chosen one."""


class PairParams(StageParams):
    """Choice of the responses of a prompt that become pairs, and of what happens to ties."""

    stage: ClassVar[str] = "pair"
    version: ClassVar[str] = "3"
    inputs = {
        "responses": InputSpec(many=True),
        "scores": InputSpec(many=True),
        "code": InputSpec(optional=True),
    }
    outputs = {
        "pairs.parquet": OutputSpec("pairs"),
        "metrics.json": OutputSpec("file"),
    }

    strategy: Literal[Strategy, "python"] = "best_worst"
    """Choice of the two responses to compare; the better scored one is the chosen one. `python`
    asks a function of a Python file (input ``code``, section `python`; docs/research.md)."""

    python: OwnStrategy = OwnStrategy()
    """Settings of the strategy `python`."""

    ties: Literal["drop", "keep"] = "drop"
    """Pairs whose scores tie: dropped, as in the paper, or kept and marked."""

    pairs_per_prompt: int = Field(1, ge=1)
    """Most pairs of a prompt. No response is in two of them: the strategy chooses the next pair
    among the responses that are left, so that n pairs want 2n samples."""

    truncated: Literal["keep", "drop"] = "keep"
    """Responses that the length limit cut off: kept, or in no pair. A prompt with fewer than two
    others then makes none."""

    def unused_fields(self) -> frozenset[str]:
        """The settings of other strategies."""
        return frozenset() if self.strategy == "python" else frozenset({"python"})

    def tie_warning(self, pairs: int, ties: int) -> str | None:
        """A warning if nearly all pairs tie; ties that are dropped are not among the pairs."""
        total = pairs + ties if self.ties == "drop" else pairs
        if ties <= _MOST_TIES * total:
            return None
        return (
            f"{ties} of {total} pairs tie: no preference is learnt from them. Use an oracle that "
            "tells the responses apart, sample at a higher temperature, or more responses a prompt"
        )
