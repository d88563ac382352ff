"""Tokenizer of a checkpoint: loaded whole or refused, and compared with model and reference."""

import json
from pathlib import Path
from typing import Any

from tokenizers import decoders
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from stages.contract.checkpoints import check_tokenizer_files
from stages.contract.errors import UserError
from stages.harness.context import ModelSource
from stages.modeling.checkpoint_files import checkpoint_folder, explained, some_of


def load_tokenizer(source: ModelSource) -> Any:
    """Loads a checkpoint's tokenizer; a missing, empty or damaged one is refused."""
    if (folder := checkpoint_folder(source)) is not None:
        check_tokenizer_files(folder)
    with explained("the tokenizer", source):
        tokenizer = AutoTokenizer.from_pretrained(
            source.name_or_path,
            revision=source.revision,
            trust_remote_code=False,
            # vLLM's environment has Mistral's own library, and the others have not.
            mistral_format=False,
        )
        if _has_other_splits(tokenizer, source):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                source.name_or_path, revision=source.revision
            )
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise UserError(
            f"the tokenizer of {source.name_or_path} is empty: it has no tokens but special ones",
            "save the tokenizer that belongs to the weights with them",
        )
    return tokenizer


def _has_other_splits(tokenizer: Any, source: ModelSource) -> bool:
    """True if the tokenizer's class drops spaces, which its tokenizer.json writes as bytes.

    transformers builds a LlamaTokenizer for SentencePiece's vocabularies alone; some models with
    bytes name that class.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or isinstance(backend.decoder, decoders.ByteLevel):
        return False
    path = cached_file(
        source.name_or_path,
        "tokenizer.json",
        revision=source.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    decoder = json.loads(Path(path).read_text(encoding="utf-8")).get("decoder") if path else None
    return decoder is not None and decoder["type"] == "ByteLevel"


def require_embedded(largest: int, vocab_size: int, source: ModelSource) -> None:
    """Checks that a model has an embedding for the largest of some token ids."""
    if largest >= vocab_size:
        raise UserError(
            f"token {largest} is not in the vocabulary of {vocab_size} ({source.name_or_path})",
            "save the tokenizer that belongs to the weights with them, and name its ids alone",
        )


def require_same_tokenizer(policy: ModelSource, reference: ModelSource) -> None:
    """Checks that two models read token ids alike."""
    ours = _ids(load_tokenizer(policy))
    theirs = _ids(load_tokenizer(reference))
    if ours != theirs:
        differ = dict(ours.items() ^ theirs.items())
        raise UserError(
            f"the tokenizer of the policy {policy.name_or_path} and the tokenizer of the reference "
            f"{reference.name_or_path} differ in {len(differ)} tokens: {some_of(differ)}",
            "use a reference with the policy's tokenizer: both read the same token ids",
        )


def _ids(tokenizer: Any) -> dict[str, int | None]:
    """Ids of all tokens, and of two roles."""
    roles = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    return tokenizer.get_vocab() | roles
