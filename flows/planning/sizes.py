"""Sizes of what a run reads: rows of its data files, and a model's weights by its config.json.

No weights and no torch are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from flows.pipeline.config import RunConfig
from flows.pipeline.external import External
from flows.pipeline.step import Source
from flows.planning.cost import DTYPE_BYTES
from stages.contract.data_files import count_rows, files_of_folder
from stages.contract.errors import DamagedArtifactError, UserError
from stages.contract.request import ArtifactInput, FileInput
from stages.contract.store import Store
from stages.sft.params import ArchitectureParams

_BYTES_PER_TOKEN = 4
# A prompt of UltraFeedback has about as many.
_PROMPT_TOKENS = 256
_SHIPPED_CONFIGS = Path(__file__).parent / "models"
# Their projections of queries, keys and values have biases, which no field of theirs says.
_BIASED = ("qwen2",)
# Their queries and keys are normed.
_NORMED = ("qwen3",)


class ModelShape(BaseModel):
    """A dense decoder with gated feed-forward layers, by the fields of its config.json.

    Other families are refused by their `model_type`: their weights would be counted wrongly.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a weight in the checkpoint."""
        return DTYPE_BYTES.get(self.dtype or self.torch_dtype or "", 4)

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.num_attention_heads * self._head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys, or values, of a token."""
        return (self.num_key_value_heads or self.num_attention_heads) * self._head_width

    @property
    def layer_params(self) -> int:
        """Weights of one layer."""
        biased = self.attention_bias or self.model_type in _BIASED
        biases = self.query_width + 2 * self.kv_width if biased else 0
        norms = 2 * self.hidden_size + 2 * self._head_width * (self.model_type in _NORMED)
        matrices = 2 * (self.query_width + self.kv_width) + 3 * self.intermediate_size
        return self.hidden_size * matrices + biases + norms

    @property
    def body_params(self) -> int:
        """Weights of all layers; embedding and head left out."""
        return self.num_hidden_layers * self.layer_params

    @property
    def head_params(self) -> int:
        """Weights of the head, V · H."""
        return self.vocab_size * self.hidden_size

    @property
    def params(self) -> int:
        """All weights; those of a tied head once."""
        ends = self.head_params * (1 if self.tie_word_embeddings else 2) + self.hidden_size
        return self.body_params + ends

    def lora_params(self, rank: int) -> int:
        """Weights of adapters on all linear layers but the head: rank · (inputs + outputs)."""
        attention = 4 * self.hidden_size + 2 * (self.query_width + self.kv_width)
        feed_forward = 3 * (self.hidden_size + self.intermediate_size)
        return self.num_hidden_layers * rank * (attention + feed_forward)

    def kv_bytes(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.num_hidden_layers * self.kv_width * dtype_bytes

    @property
    def _head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


def new_model(architecture: ArchitectureParams, vocabulary: int) -> ModelShape:
    """The Llama that a warm start from scratch makes."""
    sizes = architecture.model_dump(include=set(ModelShape.model_fields))
    return ModelShape(model_type="llama", vocab_size=vocabulary, **sizes)


def read_shape(source: External, store: Store) -> ModelShape | str:
    """The shape of a model outside the run, or why it is not known.

    Args:
        source: A folder, an artifact of the store, or a model of the hub; of the hub's the local
            cache is asked, and the sizes of the paper's models are known here.
        store: Holds the artifacts.
    """
    place = _config_path(source, store)
    if isinstance(place, str):
        return place
    try:
        return ModelShape.model_validate(json.loads(place.read_text()))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    except (OSError, ValueError) as error:
        wrong = str(error)
    return f"{place} does not tell the sizes of a decoder that can be counted ({wrong})"


def _config_path(source: External, store: Store) -> Path | str:
    if isinstance(source, FileInput):
        return Path(source.location) / "config.json"
    if isinstance(source, ArtifactInput):
        try:
            artifact = store.load(source.stage, source.key)
        except DamagedArtifactError as error:
            return str(error)
        if artifact is None:
            return f"the artifact {source.stage}/{source.key[:12]} is gone"
        return artifact.file(f"{source.path}/config.json" if source.path else "config.json")
    # Only here: the client takes a while to load.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repo, "config.json", revision=source.revision)
    if isinstance(found, str):
        return Path(found)
    shipped = _SHIPPED_CONFIGS / f"{source.repo.replace('/', '--')}.json"
    if shipped.exists():
        return shipped
    return (
        f"the sizes of {source.repo} are not known here: fetch its configuration with "
        f"`hf download {source.repo} config.json --revision {source.revision}`"
    )


@dataclass(frozen=True)
class Rows:
    """Rows of data files outside the store.

    Attributes:
        number: Rows.
        tokens: Mean length, at four bytes a token.
    """

    number: int
    tokens: float


def rows_of(sources: Sequence[Source]) -> Rows | None:
    """Rows of local data files and folders; None if one of them is elsewhere or no table."""
    local = [Path(each.location) for each in sources if isinstance(each, FileInput)]
    counted = _sum(local) if len(local) == len(sources) else None
    if counted is None:
        return None
    number, size = counted
    return Rows(number, size / max(number, 1) / _BYTES_PER_TOKEN)


def train_prompts(config: RunConfig, data: Rows | None) -> float | None:
    """Prompts of one iteration; None if nothing tells their number."""
    part = config.prepare.prompts_per_iteration
    if data is None:
        return config.estimation.prompts_per_iteration or part
    held_out = 0 if config.inputs.test_prompts else config.prepare.test_prompts
    here = max(data.number - held_out, 0) / config.iterations
    return min(here, part) if part else here


def prompt_tokens(config: RunConfig, data: Rows | None) -> float:
    """Mean length of a prompt."""
    longest = config.generate.max_length_tokens
    mean = config.estimation.prompt_tokens or (data.tokens if data else _PROMPT_TOKENS)
    return min(mean, longest) if longest else mean


def held_out_prompts(config: RunConfig, data: Rows | None) -> float:
    """Held-out prompts: the rows of their own file, else as many as `prepare` holds out."""
    return config.prepare.test_prompts if data is None else data.number


def _sum(paths: Sequence[Path]) -> tuple[int, int] | None:
    """Counts rows and bytes of files or folders; None if there are none, or one is no table."""
    counted = [_count(each) for each in paths]
    known = [each for each in counted if each is not None]
    if not known or len(known) < len(counted):
        return None
    return sum(rows for rows, _ in known), sum(size for _, size in known)


def _count(path: Path) -> tuple[int, int] | None:
    """Rows and bytes of a file of prompts or conversations, or of a folder of them."""
    if path.is_dir():
        return _sum(files_of_folder(path))
    if not path.is_file():
        return None
    try:
        if path.suffix != ".parquet":
            return count_rows(path), path.stat().st_size
        metadata = pq.read_metadata(path)
    except (UserError, OSError, pa.ArrowInvalid):
        # `prepare` says what is wrong with it.
        return None
    groups = range(metadata.num_row_groups)
    return metadata.num_rows, sum(metadata.row_group(each).total_byte_size for each in groups)
