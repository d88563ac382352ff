"""Model servers that a run starts for its oracles: their parameters, and their addresses."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field

from stages.contract.params import ImageName, InputSpec, StageParams
from stages.contract.records import read_record
from stages.score.params import EngineArgs
from stages.store.base import Store

SERVED_NAME = "served"
"""Name under which a server knows its model."""


class ServeParams(StageParams):
    """Serves an oracle's model until the run that started it ends; no artifact comes of it.

    Runs that ask for the same find the server by its key.
    """

    stage: ClassVar[str] = "serve"
    version: ClassVar[str] = "1"
    inputs: ClassVar[Mapping[str, InputSpec]] = {"model": InputSpec("model")}
    image: ClassVar[ImageName] = "vllm"

    engine_args: EngineArgs = Field(default_factory=dict)
    """Options of ``vllm serve`` by name."""
    machine: str = ""
    """Host whose programs and containers alone reach the server; empty if other hosts do."""


class Address(BaseModel):
    """Address of a server that answers, up to the path, and the token that it asks for."""

    url: str
    token: str


def address_path(store: Store, key: str) -> Path:
    """File with the address of the server with a key; it is there while the server answers."""
    return store.work_path(ServeParams.stage, key) / "address.json"


def find_address(store: Store, key: str) -> Address | None:
    """The address of the server with a key; None if it does not answer yet, or any more."""
    try:
        return read_record(address_path(store, key), Address)
    except FileNotFoundError:
        return None
