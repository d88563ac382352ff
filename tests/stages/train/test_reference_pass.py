"""The pass of the reference: computed in parts, and resumed."""

import io
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stages.contract.errors import StoppedError
from stages.contract.events import Emitter
from stages.tables.parts import Part
from stages.train import reference
from stages.train.data import load_pairs
from stages.train.params import TrainParams
from stages.train.reference import compute_reference
from stages.training.engine import Process
from stages.training.policy import Numerics
from tests.stages.train.train_helpers import PARAMS, make_pairs

NUMERICS = Numerics(torch.device("cpu"), "float32", autocast=False)


class CountedModel(torch.nn.Module):
    """Gives −token for each target, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, input_ids, source_index, targets, groups):
        self.passes += 1
        return -targets.float()


class OneOfSeveral(Process):
    """A process whose peers compute nothing."""

    def gathered(self, value):
        return [value]

    def barrier(self):
        pass


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "PART_PAIRS", 4)
    params = TrainParams.model_validate(PARAMS)
    return load_pairs([make_pairs(tmp_path / "pairs.parquet", 18)], params)[0]


def run(folder, pairs, *, rank=0, world=1, stop=lambda: False):
    """The log-probabilities, and the number of passes."""
    model = CountedModel()

    @contextmanager
    def load():
        yield model

    logprobs = compute_reference(
        pairs,
        load,
        folder,
        numerics=NUMERICS,
        params=TrainParams(micro_batch_tokens=8),
        process=OneOfSeveral(rank, rank, world, Emitter(io.StringIO()), stop),
    )
    return logprobs, model.passes


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_a_retry_computes_the_missing_parts_alone(tmp_path, pairs):
    folder = tmp_path / "parts"
    logprobs, passes = run(folder, pairs)
    assert list(logprobs) == list(range(18))
    assert logprobs[3][0].tolist() == (-pairs[3].chosen.token_ids).tolist()
    before = contents(folder)
    assert len(before) == 5
    assert run(folder, pairs)[1] == 0
    (folder / sorted(before)[2]).unlink()
    assert 0 < run(folder, pairs)[1] < passes
    assert contents(folder) == before


def test_processes_share_a_part_in_as_many_passes(tmp_path, pairs, monkeypatch):
    shares = []

    def gathered(self, value):
        shares.append(value)
        # The first process finds that the part is missing.
        return [[Part(tmp_path, reference.REFERENCE_LOGPROBS, 0, 4)] if value == [] else value]

    monkeypatch.setattr(OneOfSeveral, "gathered", gathered)
    monkeypatch.setattr(reference, "reference_rows", lambda part, logprobs: [])
    monkeypatch.setattr(reference, "read_reference", lambda paths: {})
    passes = [run(tmp_path / str(rank), pairs[:4], rank=rank, world=3)[1] for rank in range(3)]
    assert len(set(passes)) == 1
    assert set().union(*(share for share in shares if isinstance(share, dict))) == {0, 1, 2, 3}


def test_a_stop_ends_it_after_a_pass(tmp_path, pairs):
    with pytest.raises(StoppedError):
        run(tmp_path / "parts", pairs, stop=lambda: True)
