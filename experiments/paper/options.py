"""Options of the paper's experiments: scale and judge."""

from typing import Literal

from stages.contract.params import Settings

Scale = Literal["small", "chat", "full"]


class Judge(Settings):
    """The chat model that judges AlpacaEval and coherence."""

    model: str
    """Its name at the server."""
    url: str = "https://api.openai.com/v1/chat/completions"
    """Address of the server's chat completions."""
    key_env: str | None = None
    """Variable that holds the server's key."""
