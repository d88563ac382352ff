"""Training in bfloat16: the checkpoint holds the float32 weights that the optimizer updated.

A single step of Adam moves each weight by the learning rate, whatever its gradient: that is the
number which every layout must save. It is far below a step of bfloat16.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.stages.train.train_helpers import make_pairs, train
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

RATE = 1e-5
ONE_STEP = {
    "epochs": 1,
    "global_batch_pairs": 1000,
    "learning_rate": RATE,
    "adam_epsilon": 1e-14,
    "max_grad_norm": 0.0,
    "warmup_ratio": 0.0,
    "lr_schedule": "constant",
    "precision": "bfloat16",
}


def zero(stage, **settings):
    return {"deepspeed": {"zero_stage": stage, **settings}}


LAYOUTS = {
    # Settings, processes.
    "one process": ({}, 1),
    "two processes": ({}, 2),
    "zero-1": (zero(1), 2),
    "zero-2 in one process": (zero(2), 1),
    "zero-2": (zero(2), 2),
    "zero-2 offloaded": (zero(2, offload_optimizer=True), 2),
    # Three does not divide the weights' sizes.
    "zero-3": (zero(3), 3),
    "zero-3 offloaded": (zero(3, offload_optimizer=True, offload_parameters=True), 2),
}

EVERYDAY = ("one process", "zero-2", "zero-3")
OTHERS = [layout for layout in LAYOUTS if layout not in EVERYDAY]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 8)


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """The same policy saved in float32, and rounded to bfloat16."""
    folder = tmp_path_factory.mktemp("starts")
    # DeepSpeed leaves weights of up to 100,000 numbers whole under ZeRO-3.
    wide = make_tiny_llama(folder / "float32", intermediate_size=3336, num_hidden_layers=1)
    low = folder / "bfloat16"
    AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16).save_pretrained(low)
    AutoTokenizer.from_pretrained(wide).save_pretrained(low)
    return {"float32": wide, "bfloat16": low}


def changes(checkpoint, start):
    """Distance of the weights from the start, without the rows of unused words."""
    before = load_file(start / "model.safetensors")
    after = load_file(checkpoint / "model.safetensors")
    moved = (after[name].double() - before[name].double() for name in after if "embed" not in name)
    return torch.cat([change.flatten() for change in moved])


@pytest.fixture(scope="module")
def expected(tmp_path_factory, starts, pairs):
    """Changes of a training wholly in float32."""
    store = tmp_path_factory.mktemp("store")
    settings = ONE_STEP | {"precision": "float32"}
    return {
        name: changes(train(store, start, [pairs], **settings).checkpoint, start)
        for name, start in starts.items()
    }


@pytest.mark.parametrize(
    ("layout", "start"),
    [
        *((layout, "bfloat16") for layout in EVERYDAY),
        *(pytest.param(layout, "bfloat16", marks=pytest.mark.slow) for layout in OTHERS),
        *(pytest.param(layout, "float32", marks=pytest.mark.slow) for layout in EVERYDAY),
    ],
)
def test_a_step_is_saved_whole(tmp_path, starts, pairs, expected, layout, start):
    settings, processes = LAYOUTS[layout]
    options = ONE_STEP | settings
    training = train(tmp_path / "store", starts[start], [pairs], processes=processes, **options)
    moved = changes(training.checkpoint, starts[start])
    is_whole = (moved.abs() / RATE - 1).abs() < 0.05
    assert is_whole.double().mean() > 0.97
    cosine = torch.nn.functional.cosine_similarity(moved, expected[start], dim=0)
    assert cosine > 0.9


@pytest.mark.parametrize("limit", [0.01, 0.02])
def test_deepspeed_clips_gradients_at_max_grad_norm(tmp_path, starts, pairs, limit):
    """If epsilon is far above all gradients, a step is as long as the clipped gradient."""
    step = {"learning_rate": 1.0, "adam_epsilon": 1.0, "precision": "float32"}
    options = ONE_STEP | step | {"max_grad_norm": limit} | zero(2)
    training = train(tmp_path / "store", starts["float32"], [pairs], **options)
    before = load_file(starts["float32"] / "model.safetensors")
    after = training.tensors
    moved = torch.cat([(after[name].double() - before[name]).flatten() for name in before])
    assert moved.norm().item() == pytest.approx(limit, rel=0.02)


@pytest.mark.parametrize("settings", [{}, zero(2), zero(3)], ids=["off", "zero-2", "zero-3"])
def test_adapters_are_merged_into_the_base_as_it_was_given(tmp_path, starts, pairs, settings):
    start = starts["float32"]
    options = ONE_STEP | {"learning_rate": 1e-3, "lora": {"rank": 2, "alpha": 4.0}} | settings
    after = train(tmp_path / "store", start, [pairs], **options).tensors
    for name, weight in load_file(start / "model.safetensors").items():
        change = after[name].double() - weight
        if "_proj" not in name:
            assert not change.any(), name
            continue
        # Weights or adapters that were rounded to bfloat16 would change in more directions.
        sizes = torch.linalg.svdvals(change)
        assert sizes[0] > 1e-3
        assert sizes[2] < 1e-4 * sizes[0]


@pytest.mark.parametrize(
    "settings", [zero(1), zero(2), zero(3)], ids=["zero-1", "zero-2", "zero-3"]
)
def test_gradients_of_many_micro_batches_add_up_in_float32(tmp_path, starts, settings):
    """If epsilon is far above all gradients, a step is as long as their sum."""
    pairs = make_pairs(tmp_path / "pairs.parquet", 128)
    options = ONE_STEP | {"learning_rate": 1.0, "adam_epsilon": 1.0} | settings
    start = starts["bfloat16"]
    whole = train(tmp_path / "one", start, [pairs], micro_batch_tokens=10_000, **options)
    parts = train(tmp_path / "many", start, [pairs], micro_batch_tokens=16, **options)
    one, many = changes(whole.checkpoint, start), changes(parts.checkpoint, start)
    # Added up in bfloat16 they differ by a hundredth.
    assert (many - one).norm() < 0.005 * one.norm()
