"""The paper's tables and figures, at its own size and at the size of one machine."""

from typing import Literal

Scale = Literal["small", "chat", "full"]
