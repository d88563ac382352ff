"""Events that a stage prints, one JSON object a line, and that a runner reads."""

import re
import sys
import time
from collections.abc import Callable
from typing import Annotated, Literal, TextIO

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

PROGRESS_INTERVAL_SECONDS = 0.5
# Longest message: a library's exception may hold a whole batch as text.
_MAX_CHARACTERS = 20_000
# Line feeds and tabs stay. PostgreSQL refuses NUL, and escape sequences steer terminals.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def escape_controls(text: str) -> str:
    """The text with its control characters spelled out, as Python's source code does."""
    return _CONTROL_CHARACTER.sub(lambda match: ascii(match[0])[1:-1], text)


def _writable(text: object) -> str:
    """The start of a message, without control characters."""
    # File names and texts of programs may hold half of a surrogate pair.
    start = str(text)[:_MAX_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return escape_controls(start)


Message = Annotated[str, BeforeValidator(_writable)]


class Progress(BaseModel):
    """Progress of a stage."""

    type: Literal["progress"] = "progress"
    done: int
    total: int
    unit: str
    note: str = ""


class Metric(BaseModel):
    """Values worth watching while a stage works (loss, reward, tokens per second)."""

    # By default they would be written as null, and the line would not be read as a metric.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    type: Literal["metric"] = "metric"
    step: int
    values: dict[str, float]


class Log(BaseModel):
    """A line for a person."""

    type: Literal["log"] = "log"
    level: Literal["info", "warning", "error"] = "info"
    message: Message


class Failure(BaseModel):
    """The stage's own last word: why it ends."""

    type: Literal["failure"] = "failure"
    kind: Literal["user", "crash", "stopped"]
    message: Message
    remedy: Message = ""


Event = Annotated[Progress | Metric | Log | Failure, Field(discriminator="type")]
OnEvent = Callable[[Event], None]
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def warning_to(on_event: OnEvent) -> Callable[[str], None]:
    """A function that passes a text on as a warning."""
    return lambda message: on_event(Log(level="warning", message=message))


def parse_event(line: str) -> Event | None:
    """Reads one line of a stage's stdout; None if it is not an event."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError:
        return None


class Emitter:
    """Writes events to a stream, the stage's real stdout; progress at most every half second."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_progress = float("-inf")
        self._position = (0, 1, "steps")
        self._is_heard = True

    def emit(self, event: BaseModel) -> None:
        """Writes one event; its message goes to the log once the orchestrator is dead."""
        if self._is_heard:
            try:
                self._stream.write(event.model_dump_json() + "\n")
                self._stream.flush()
                return
            except BrokenPipeError:
                # The stage goes on until it has saved.
                self._is_heard = False
        if isinstance(event, Log | Failure):
            kind = event.level if isinstance(event, Log) else event.kind
            sys.stderr.write(f"[{kind}] {event.message}\n")

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        """Says how far the stage is; the first and the last value are never dropped."""
        self._position = (done, total, unit)
        now = time.monotonic()
        if done < total and now - self._last_progress < PROGRESS_INTERVAL_SECONDS:
            return
        self._last_progress = now
        self.emit(Progress(done=done, total=total, unit=unit, note=note))

    def note(self, note: str) -> None:
        """Adds a note to the last progress."""
        self.progress(*self._position, note)

    def metric(self, step: int, **values: float) -> None:
        """Reports values at a step."""
        self.emit(Metric(step=step, values=values))

    def info(self, message: str) -> None:
        """Tells a person something."""
        self.emit(Log(message=message))

    def warning(self, message: str) -> None:
        """Tells a person something that deserves attention."""
        self.emit(Log(level="warning", message=message))
