"""Small checkpoints made on the spot: word-level tokenizer with a chat template, tiny Llamas."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<system>", "<user>", "<assistant>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
WORDS = ("red", "blue", "green", "one", "two", "three", "four", "cat", "dog", "bird", "runs", "?")
# Sizes of decoders of every family, for their configurations.
SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} "
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tiny_tokenizer(words=WORDS, chat_template=CHAT_TEMPLATE):
    """A tokenizer with one token per word, split at white space."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
    )
    fast.chat_template = chat_template
    return fast


def tiny_config(vocab_size, **changes):
    """Configuration of a Llama of some 20,000 parameters."""
    sizes = {"vocab_size": vocab_size, "intermediate_size": 64, "max_position_embeddings": 128}
    # Wide enough that next-token distributions differ from uniform and from each other.
    return LlamaConfig(**{**SIZES, **sizes, "initializer_range": 0.4, **changes})


def make_tiny_llama(
    path, *, seed=0, words=WORDS, chat_template=CHAT_TEMPLATE, kind=LlamaForCausalLM, **config
):
    """Writes a causal LM with its tokenizer to ``path`` and returns it.

    Args:
        words: The vocabulary without the special tokens.
        chat_template: None writes a tokenizer without one.
        kind: The model, where it is another one.
        config: Changes to :func:`tiny_config`.
    """
    tokenizer = make_tiny_tokenizer(words, chat_template)
    torch.manual_seed(seed)
    kind(tiny_config(len(tokenizer), **config)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def save_tiny_model(config, path):
    """Writes a causal LM of any family with the tokenizer to ``path`` and returns it."""
    tokenizer = make_tiny_tokenizer()
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS_ID, EOS_ID, PAD_ID
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_head_beside_a_tied_config(path, **options):
    """Writes a causal LM with a head unlike its embeddings, and a config.json that says tied."""
    make_tiny_llama(path, tie_word_embeddings=False, **options)
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_tiny_reward_model(path, **options):
    """Writes a sequence classifier with one output, with the options of a causal LM."""
    options = {"num_labels": 1, **options}
    return make_tiny_llama(path, kind=LlamaForSequenceClassification, **options)


def response_logprobs(model, prompt, response):
    """Log-probabilities of a response's tokens, by a forward pass of this row alone, in float64."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
