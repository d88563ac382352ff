"""The warm start in several processes and under ZeRO: the curve of one process."""

import io

import pytest
from safetensors.torch import load_file
from transformers import NemotronConfig

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.contract.request import Resources
from stages.harness.program import execute
from stages.sft.params import ArchitectureParams, SftParams
from stages.sft.run import STAGE
from tests.stage_calls import request_for, write_jsonl
from tests.stages.sft.test_sft_run import ARCHITECTURE, ROWS, losses
from tests.tiny_models import SIZES, save_tiny_model

pytestmark = pytest.mark.slow

# Fifteen steps, each of several micro-batches.
SETTINGS = {
    "epochs": 3,
    "global_batch_rows": 5,
    "micro_batch_tokens": 24,
    "learning_rate": 1e-2,
    "precision": "float32",
    "gradient_checkpointing": False,
}


def train(folder, *, processes=1, policy=None, **changes):
    folder.mkdir(exist_ok=True)
    inputs = {"data": write_jsonl(folder / "data.jsonl", ROWS)}
    if policy is not None:
        inputs["policy"] = policy
    params = SftParams(architecture=ArchitectureParams(**ARCHITECTURE), **SETTINGS | changes)
    resources = Resources(processes=processes)
    request = request_for(params, inputs, folder / "store", resources=resources)
    return execute(STAGE, request, Emitter(io.StringIO()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("settings", "processes"),
    [({"deepspeed": {"zero_stage": 2}}, 1), ({"deepspeed": {"zero_stage": 3}}, 2)],
)
def test_the_loss_curve_in_shards_equals_one_process(tmp_path, plain, settings, processes):
    artifact = train(tmp_path, processes=processes, **settings)
    assert losses(artifact.path) == pytest.approx(losses(plain.path), rel=1e-3, abs=1e-3)
    expected = load_file(plain.path / "checkpoint" / "model.safetensors")
    saved = load_file(artifact.path / "checkpoint" / "model.safetensors")
    assert {name: weight.shape for name, weight in saved.items()} == {
        name: weight.shape for name, weight in expected.items()
    }
    assert artifact.manifest.key == plain.manifest.key


def test_shards_of_a_family_that_cannot_be_packed_are_refused(tmp_path):
    policy = save_tiny_model(NemotronConfig(**SIZES), tmp_path / "policy")
    with pytest.raises(UserError, match=r"packed into .*/policy.*lose the layout") as error:
        train(tmp_path, policy=policy, deepspeed={"zero_stage": 3})
    assert error.value.remedy == "set sft.row_layout=padded"
    train(tmp_path, policy=policy, deepspeed={"zero_stage": 3}, row_layout="padded", epochs=1)
