"""Sizes of a decoder's weights, read from its config.json: no weights and no torch are loaded.

Shapes: `H` width, `F` width of the feed-forward layers, `V` vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from flows.pipeline.external import External
from stages.contract.errors import DamagedArtifactError
from stages.contract.request import ArtifactInput, FileInput
from stages.contract.store import Store
from stages.sft.params import ArchitectureParams

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("num_local_experts", "num_experts", "num_experts_per_tok"),
)
# Their projections of queries, keys and values have biases, which no field of theirs says.
_BIASED = ("qwen2", "qwen2_moe")


SHIPPED_CONFIGS = Path(__file__).parent / "models"
"""Sizes of the paper's models, as their config.json has them."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated feed-forward layers (Llama, Mistral, Qwen, Mixtral and their like).

    Attributes:
        hidden: Width of the residual stream, H.
        layers: Decoder layers.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        intermediate: Width of a feed-forward layer (of one expert), F.
        vocabulary: Tokens, V.
        tied: Whether the head is the embedding.
        context: Longest sequence.
        dtype_bytes: Bytes of a weight in the checkpoint.
        experts: Experts of a layer; 0 for one feed-forward layer.
        experts_per_token: Experts that a token passes.
        attention_bias: Whether queries, keys and values have biases.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    context: int
    dtype_bytes: int
    experts: int = 0
    experts_per_token: int = 0
    attention_bias: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Reads the fields of a config.json.

        Raises:
            ValueError: It has not those of such a decoder.
        """
        nested = config.get("text_config")
        text = {**config, **(nested if isinstance(nested, Mapping) else {})}
        feed_forward = text.get("moe_intermediate_size") or text.get("intermediate_size")
        missing = [name for name in _NEEDED if not _is_size(text.get(name))]
        if missing or not _is_size(feed_forward):
            raise ValueError(f"no {', '.join(missing or ['intermediate_size'])}")
        wrong = [name for name in _OPTIONAL if text.get(name) and not _is_size(text[name])]
        if wrong:
            raise ValueError(f"no sizes: {', '.join(wrong)}")
        heads = text["num_attention_heads"]
        experts = text.get("num_local_experts") or text.get("num_experts") or 0
        return cls(
            hidden=text["hidden_size"],
            layers=text["num_hidden_layers"],
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            intermediate=feed_forward,
            vocabulary=text["vocab_size"],
            tied=bool(text.get("tie_word_embeddings", False)),
            context=text.get("max_position_embeddings") or 0,
            dtype_bytes=_BYTES.get(str(text.get("dtype") or text.get("torch_dtype")), 4),
            experts=experts,
            experts_per_token=text.get("num_experts_per_tok") or 0 if experts else 0,
            attention_bias=bool(text.get("attention_bias") or text.get("model_type") in _BIASED),
        )

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys, or values, of a token."""
        return self.kv_heads * self.head_dim

    @property
    def layer_params(self) -> int:
        """Weights of one layer."""
        return self._layer(max(self.experts, 1))

    @property
    def active_params(self) -> int:
        """Weights of all layers that a token passes; embedding and head left out."""
        return self.layers * self._layer(self.experts_per_token or 1)

    @property
    def head_params(self) -> int:
        """Weights of the head, V · H."""
        return self.vocabulary * self.hidden

    @property
    def params(self) -> int:
        """All weights; those of a tied head once."""
        ends = self.head_params * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer_params + ends

    def lora_params(self, rank: int) -> int:
        """Weights of adapters on all linear layers but the head."""
        # Each has rank · (inputs + outputs).
        attention = 2 * (self.hidden + self.query_width) + 2 * (self.hidden + self.kv_width)
        feed_forward = 3 * (self.hidden + self.intermediate) * max(self.experts, 1)
        return self.layers * rank * (attention + feed_forward)

    def kv_bytes(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_width * dtype_bytes

    def _layer(self, experts: int) -> int:
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        biases = self.query_width + 2 * self.kv_width if self.attention_bias else 0
        router = self.hidden * self.experts
        return (
            attention
            + biases
            + 3 * self.hidden * self.intermediate * experts
            + router
            + (2 * self.hidden)
        )


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def new_model(architecture: ArchitectureParams, vocabulary: int) -> ModelShape:
    """The Llama that a warm start from scratch makes."""
    return ModelShape(
        hidden=architecture.hidden_size,
        layers=architecture.num_hidden_layers,
        heads=architecture.num_attention_heads,
        kv_heads=architecture.num_attention_heads,
        head_dim=architecture.hidden_size // architecture.num_attention_heads,
        intermediate=architecture.intermediate_size,
        vocabulary=vocabulary,
        tied=architecture.tie_word_embeddings,
        context=architecture.max_position_embeddings,
        dtype_bytes=4,
    )


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
        config = json.loads(place.read_text())
        if not isinstance(config, Mapping):
            raise ValueError("no JSON object")
        return ModelShape.from_config(config)
    except (OSError, ValueError) as error:
        return f"{place} does not tell the sizes of a decoder ({error})"


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
    shipped = SHIPPED_CONFIGS / f"{source.repo.replace('/', '--')}.json"
    if shipped.exists():
        return shipped
    return (
        f"the sizes of {source.repo} are not known here: fetch its configuration with "
        f"`hf download {source.repo} config.json --revision {source.revision}`"
    )
