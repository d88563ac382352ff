"""Tokenizers of checkpoints give the tokens of their tokenizer.json."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from stages.harness.context import ModelSource
from stages.modeling.tokenizers import load_tokenizer

TEXT = "What is 12 plus 30?\nReason."


def byte_level_tokenizer():
    vocabulary = {
        character: number for number, character in enumerate(pre_tokenizers.ByteLevel.alphabet())
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"</s>": len(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_spaces_and_lines_stay_whatever_class_a_checkpoint_names(tmp_path, name):
    backend = byte_level_tokenizer()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    LlamaConfig(vocab_size=257).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    tokenizer = load_tokenizer(ModelSource(str(tmp_path)))
    token_ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert token_ids == backend.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids) == TEXT
