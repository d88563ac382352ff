"""Damaged checkpoints of the policy and of the reward model."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file

from benchmarks.bad_inputs.trial import Case
from tests.stages.modeling.test_damaged_checkpoints import (
    INDEX,
    OF_THE_MODEL,
    OF_THE_TOKENIZER,
    WEIGHTS,
    Damage,
    bytes_of,
    content,
    replaced_by_folder,
    settings,
)
from tests.tiny_models import WORDS, make_tiny_llama, make_tiny_reward_model, make_tiny_tokenizer

_NORM = "model.norm.weight"
# Damages of the tests that no reading without the model's class can see. The tests load others of
# them, too; a run costs more.
_SEEN_BY_LOADING = ("one shape", "one missing", "not a number", "another vocabulary")
_LEFT_TO_TESTS = (
    "infinite",
    "minus infinity",
    "more layers",
    "an unknown activation",
    "a width of text",
    "an unknown model",
    "tokenizer.json hollow",
    "without words",
)


@dataclass(frozen=True)
class Bad:
    """A damage of a good checkpoint.

    Attributes:
        damage: Changes the files of its folder.
        says: Texts that the message must have besides the folder's name.
        by: See :class:`benchmarks.bad_inputs.trial.Case`.
        why: Why it is right to accept it.
    """

    damage: Damage
    says: tuple[str, ...] = ()
    by: Literal["itself", "run"] | None = "run"
    why: str = ""


def _config(*says: str, **changes: Any) -> Bad:
    return Bad(settings("config.json", **changes), says)


def _sizes(**changes: int) -> Bad:
    """Sizes that no model has."""
    [(name, size)] = changes.items()
    return Bad(settings("config.json", **changes), (f"{name} is {size}",), "itself")


def _template(text: Any, *says: str) -> Bad:
    def damage(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        settings("tokenizer_config.json", chat_template=text)(folder)

    return Bad(damage, says)


def _shards(change: Callable[[dict[str, str]], object], *says: str, **more: Any) -> Bad:
    """A checkpoint of two files and an index; the index's map is changed."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        names = sorted(tensors)
        parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file(
                {name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"}
            )
        index = {name: file for file, part in parts.items() for name in part}
        change(index)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))

    return Bad(damage, says, **more)


def _after(first: Bad, then: Damage, *says: str, **more: Any) -> Bad:
    def damage(folder: Path) -> None:
        first.damage(folder)
        then(folder)

    return Bad(damage, says, **more)


def _header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Weights whose header is changed, and the data is not."""

    def changed(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return bytes_of(WEIGHTS, changed)


def _removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def _linked(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def _emptied(*names: str) -> Damage:
    """A folder with only some of its files, or a file that does not belong to a checkpoint."""

    def damage(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()
        (folder / "README.md").write_text("A model.")

    return damage


def _other_words(folder: Path) -> None:
    make_tiny_tokenizer(words=(*WORDS, "purple", "orange")).save_pretrained(folder)


_CHECKPOINTS: dict[str, Bad] = {
    **{
        name: Bad(damage, (), "run" if name in _SEEN_BY_LOADING else "itself")
        for name, (damage, _) in (OF_THE_MODEL | OF_THE_TOKENIZER).items()
        if name not in _LEFT_TO_TESTS
    },
    "weights of random bytes": Bad(
        bytes_of(WEIGHTS, lambda data: b"\x5a" * len(data)), (WEIGHTS,), "itself"
    ),
    "an unknown type of weights": Bad(
        _header(lambda found: found[_NORM].update(dtype="F99")), ("SafetensorError",)
    ),
    "a shape of another size than its data": Bad(
        _header(lambda found: found[_NORM].update(shape=[7])), ("invalid shape",)
    ),
    "weights beyond the file": Bad(
        _header(lambda found: found[_NORM].update(data_offsets=[0, 1 << 40])), (WEIGHTS,), "itself"
    ),
    "weights at no numbers": Bad(
        _header(lambda found: found[_NORM].update(data_offsets=["a", None])), (WEIGHTS,), "itself"
    ),
    "weights through a link to nothing": Bad(_linked(WEIGHTS, "nothing"), (WEIGHTS,), "itself"),
    "whole shards": _shards(
        lambda index: None, by=None, why="it is the usual form of larger models"
    ),
    "a missing shard": _after(
        _shards(lambda index: None),
        _removed("model-2.safetensors"),
        "model-2.safetensors",
        by="itself",
    ),
    "a truncated shard": _after(
        _shards(lambda index: None),
        bytes_of("model-2.safetensors", lambda data: data[:-9]),
        "model-2.safetensors",
        by="itself",
    ),
    "a shard outside of the folder": _after(
        _shards(lambda index: index.update({_NORM: "../model-2.safetensors"})),
        lambda folder: shutil.copy(folder / "model-2.safetensors", folder.parent),
        "../model-2.safetensors",
        by="itself",
    ),
    "a shard by its whole path": _shards(
        lambda index: index.update({_NORM: "/etc/passwd"}), "/etc/passwd", by="itself"
    ),
    "a shard that lacks its weight": _shards(
        lambda index: index.update(
            {
                _NORM: "model-1.safetensors"
                if index[_NORM] == "model-2.safetensors"
                else "model-2.safetensors"
            }
        ),
        by=None,
        why="all weights of the files are read, whichever the index names",
    ),
    "an index of nothing": _shards(lambda index: index.clear(), INDEX, by="itself"),
    "config.json a folder": Bad(replaced_by_folder("config.json"), ("config.json",), "itself"),
    "a model of a list": Bad(
        settings("config.json", model_type=["llama"]), ("model_type",), "itself"
    ),
    "no width": _sizes(hidden_size=0),
    "a huge width": _sizes(hidden_size=10**12),
    "a width that its heads do not divide": _config("heads", num_attention_heads=5),
    "no heads": _config("num_attention_heads", num_attention_heads=0),
    "heads without a group": _config("k_proj.weight [16, 32] for [24, 32]", num_key_value_heads=3),
    "negative layers": _sizes(num_hidden_layers=-1),
    "huge layers": _sizes(num_hidden_layers=10**9),
    "a negative vocabulary": _sizes(vocab_size=-1),
    "a vocabulary of text": _config("vocab_size", vocab_size="many"),
    "a context of nothing": _sizes(max_position_embeddings=0),
    "a negative context": _sizes(max_position_embeddings=-5),
    "a context of text": _config("max_position_embeddings", max_position_embeddings="long"),
    "an unknown type of numbers": _config("nope", dtype="nope", torch_dtype="nope"),
    "an end beyond the vocabulary": Bad(
        settings("config.json", eos_token_id=10**6),
        by=None,
        why="the tokenizer's end ends responses, too",
    ),
    "an unknown quantisation": Bad(
        settings("config.json", quantization_config={"quant_method": "nope"}),
        by=None,
        why="transformers warns, and reads the weights, which are plain",
    ),
    "an unknown rotation": _config(
        "nope", rope_parameters={"rope_type": "nope", "rope_theta": 1e4}
    ),
    "a norm of text": _config("rms_norm_eps", rms_norm_eps="small"),
    "code of its own": Bad(
        settings("config.json", model_type="nope", auto_map={"AutoConfig": "x.Y"}), ("remote code",)
    ),
    "an encoder": _config("bert", model_type="bert"),
    "two outputs for one": _config("lacks", architectures=["LlamaModel"], num_hidden_layers=4),
    "an adapter of another base": Bad(
        content(
            "adapter_config.json",
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": "/nowhere"}),
        ),
        ("adapter_config.json",),
        "itself",
    ),
    "an adapter alone": Bad(
        lambda folder: (_emptied()(folder), (folder / "adapter_config.json").write_text("{}")),
        ("LoRA adapter",),
        "itself",
    ),
    "a folder of no checkpoint": Bad(_emptied(), ("config.json",), "itself"),
    "config.json alone": Bad(_emptied("config.json"), (), "itself"),
    "no chat template": Bad(
        lambda folder: (folder / "chat_template.jinja").unlink(), ("chat template",), "itself"
    ),
    "another vocabulary's tokenizer": Bad(
        _other_words,
        by=None,
        why="a prompt with a token beyond the vocabulary is refused by its place; these have none",
    ),
    "a tokenizer of an unknown class": Bad(
        settings("tokenizer_config.json", tokenizer_class="NopeTokenizer"),
        by=None,
        why="transformers then reads tokenizer.json by itself",
    ),
    "a template with a mistake": _template("{% for message in", "chat template"),
    "a template that names no filter": _template("{{ messages | nope }}", "chat template"),
    "a template that names no function": _template("{{ nope() }}", "chat template"),
    "a template that divides by nothing": _template("{{ 1 / 0 }}", "chat template"),
    "a template that wants what is not there": _template(
        "{{ messages[99].content.x }}", "chat template"
    ),
    "a template of a number": _template(3, "chat"),
    "a template that says nothing": _template(" ", "chat template"),
    "a template that ignores its messages": _template("{{ bos_token }}red blue", "chat template"),
    "a template of a long count": _template(
        "{% for a in range(10 ** 12) %}{% endfor %}", "chat template"
    ),
    "a template that raises": _template("{{ raise_exception('no') }}", "chat template", "no"),
    "a template that reaches out": _template(
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"
    ),
    "a template of megabytes": _template("{{ 'x' * 10 ** 8 }}", "chat template"),
    "a template that is a folder": Bad(replaced_by_folder("chat_template.jinja"), ("chat",)),
    "pickled weights, too": Bad(
        content("pytorch_model.bin", b"no pickle"), by=None, why="they are never read"
    ),
}
_OF_THE_POLICY: dict[str, Bad] = {
    "a reward model": Bad(
        lambda folder: (shutil.rmtree(folder), make_tiny_reward_model(folder)),
        ("LlamaForSequenceClassification",),
    ),
}
_OF_THE_REWARD_MODEL: dict[str, Bad] = {
    "another vocabulary's tokenizer": Bad(_other_words, ("orange", "purple")),
    "a language model": Bad(
        lambda folder: (shutil.rmtree(folder), make_tiny_llama(folder)), ("LlamaForCausalLM",)
    ),
    "two outputs": Bad(
        lambda folder: (shutil.rmtree(folder), make_tiny_reward_model(folder, num_labels=2)), ("2",)
    ),
    "no outputs": _config(num_labels=0),
}
# The reward model is tried with these, too: another program looks for them there.
_OF_BOTH = (
    "weights truncated",
    "weights pickled",
    "no configuration",
    "config.json empty",
    "one missing",
    "not a number",
    "another vocabulary",
    "a missing shard",
    "a huge width",
    "a shard outside of the folder",
    "negative layers",
    "an adapter alone",
    "no chat template",
    "an adapter of another base",
    "tokenizer.json empty",
    "a template with a mistake",
    "a template that ignores its messages",
    "none",
    "a context of nothing",
    "pickled weights, too",
)


def cases(folder: Path, config: Path) -> Iterator[Case]:
    """All cases; the checkpoints are written to a folder.

    Args:
        folder: An empty folder.
        config: Configuration of a run, next to its good checkpoints ``policy`` and ``reward``.
    """
    both = {name: _CHECKPOINTS[name] for name in _OF_BOTH}
    groups = [
        ("policy", ("--set=inputs.policy=FILE",), _CHECKPOINTS | _OF_THE_POLICY),
        (
            "reward model",
            ("--set=score.oracle=reward_model", "--set=inputs.oracle_model=FILE"),
            both | _OF_THE_REWARD_MODEL,
        ),
    ]
    for kind, given, table in groups:
        for number, (name, bad) in enumerate(table.items()):
            place = folder / f"{kind.split()[0]}-{number}"
            shutil.copytree(config.parent / kind.split()[0], place)
            bad.damage(place)
            says = bad.says if bad.by is None else (place.name, *bad.says)
            arguments = [word.replace("FILE", str(place)) for word in given]
            yield Case(kind, name, ["plan", str(config), *arguments], says, bad.by, bad.why)
