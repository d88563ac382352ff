"""Sizes of what a run reads: rows of its data files, and a model's weights by its config.json.

No weights and no torch are loaded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from flows.pipeline.config import RunConfig
from flows.pipeline.external import External
from flows.pipeline.step import Source
from stages.contract.data_files import count_rows, files_of_folder
from stages.contract.errors import DamagedArtifactError, UserError
from stages.contract.request import ArtifactInput, FileInput
from stages.sft.params import ArchitectureParams
from stages.store.base import Store

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BYTES_PER_TOKEN = 4
# A word-level tokenizer of a warm start from scratch has about so many words.
_NEW_VOCABULARY = 1024
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


def new_model(architecture: ArchitectureParams) -> ModelShape:
    """The Llama that a warm start from scratch makes."""
    sizes = architecture.model_dump(include=set(ModelShape.model_fields))
    return ModelShape(model_type="llama", vocab_size=_NEW_VOCABULARY, **sizes)


class UnknownModelError(Exception):
    """A model whose sizes are not known, and why."""


def read_shape(source: External, store: Store) -> ModelShape:
    """The shape of a model outside the run; UnknownModelError if it cannot be counted.

    The local cache is asked for a model of the hub; the paper's models are known here.
    """
    place = _config_path(source, store)
    try:
        return ModelShape.model_validate(json.loads(place.read_text()))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    except (OSError, ValueError) as error:
        wrong = str(error)
    raise UnknownModelError(
        f"{place} does not tell the sizes of a decoder that can be counted ({wrong})"
    )


def _config_path(source: External, store: Store) -> Path:
    if isinstance(source, FileInput):
        return Path(source.location) / "config.json"
    if isinstance(source, ArtifactInput):
        try:
            artifact = store.load(source.stage, source.key)
        except DamagedArtifactError as error:
            raise UnknownModelError(str(error)) from error
        if artifact is None:
            raise UnknownModelError(f"the artifact {source.stage}/{source.key[:12]} is gone")
        return artifact.file(f"{source.path}/config.json" if source.path else "config.json")
    # Only here: the client takes a while to load.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repo, "config.json", revision=source.revision)
    if isinstance(found, str):
        return Path(found)
    shipped = _SHIPPED_CONFIGS / f"{source.repo.replace('/', '--')}.json"
    if shipped.exists():
        return shipped
    raise UnknownModelError(
        f"the sizes of {source.repo} are not known here: fetch its configuration with "
        f"`hf download {source.repo} config.json --revision {source.revision}`"
    )


class Rows(NamedTuple):
    """Number of rows of data files outside the store, and their mean length in tokens."""

    number: int
    tokens: float


def rows_of(sources: Sequence[Source]) -> Rows | None:
    """Rows of local data files and folders; None if one of them is elsewhere or no table."""
    files: list[Path] = []
    for each in sources:
        if not isinstance(each, FileInput):
            return None
        place = Path(each.location)
        files += files_of_folder(place) if place.is_dir() else [place]
    counted = [_count(file) for file in files]
    known = [each for each in counted if each is not None]
    if not known or len(known) < len(counted):
        return None
    number, size = (sum(each) for each in zip(*known, strict=True))
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
    mean = data.tokens if data else _PROMPT_TOKENS
    return min(mean, longest) if longest else mean


def held_out_prompts(config: RunConfig, data: Rows | None) -> float:
    """Held-out prompts: the rows of their own file, else as many as `prepare` holds out."""
    return config.prepare.test_prompts if data is None else data.number


def _count(path: Path) -> tuple[int, int] | None:
    """Rows and bytes of a file of prompts or conversations; None for another kind of file."""
    try:
        if path.suffix != ".parquet":
            return count_rows(path), path.stat().st_size
        metadata = pq.read_metadata(path)
    except (UserError, OSError, pa.ArrowInvalid):
        # `prepare` says what is wrong with it.
        return None
    groups = range(metadata.num_row_groups)
    return metadata.num_rows, sum(metadata.row_group(each).total_byte_size for each in groups)
