"""Shares of the reference pass: resumed in parts, and as many forward passes in every process."""

import io
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from stages.contract.errors import StoppedError
from stages.contract.events import Emitter
from stages.train import reference
from stages.train.data import load_pairs
from stages.train.params import TrainParams
from stages.train.reference import ReferencePass, read_reference
from stages.training.engine import Process
from stages.training.policy import Numerics
from tests.stages.train.train_helpers import PARAMS, make_pairs

NUMERICS = Numerics(torch.device("cpu"), "float32", autocast=False, bfloat16=False)


class CountedModel(torch.nn.Module):
    """Gives −token for each target, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, input_ids, source_index, targets, groups):
        self.passes += 1
        return -targets.float()


class OneOfSeveral(Process):
    """A process whose peers are simulated: the first finds all parts missing, none is stopped."""

    def agreed(self, value):
        return value if self.is_first else self.said_by_the_first

    said_by_the_first: ClassVar[list[int]] = []

    def any(self, flags, device):
        return flags


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(reference, "PART_PAIRS", 4)
    params = TrainParams.model_validate(PARAMS)
    return load_pairs([make_pairs(tmp_path / "pairs.parquet", 18)], params)[0]


def run(folder, pairs, rank, world, *, collective, stop=lambda: False) -> CountedModel | None:
    loaded: list[CountedModel] = []

    @contextmanager
    def load():
        loaded.append(CountedModel())
        yield loaded[0]

    class Simulated(OneOfSeveral):
        said_by_the_first = list(range(0, len(pairs), reference.PART_PAIRS))

    ReferencePass(
        load_model=load,
        folder=folder,
        numerics=NUMERICS,
        params=TrainParams(
            micro_batch_tokens=8, deepspeed={"zero_stage": 3 if collective else "off"}
        ),
        process=Simulated(rank, rank, world, Emitter(io.StringIO()), stop),
    ).run(pairs)
    return loaded[0] if loaded else None


def names(folder: Path) -> list[str]:
    """Parts of a folder, without the digests beside them."""
    return sorted(path.name for path in folder.glob("part-*"))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names(folder)}


@pytest.mark.parametrize("collective", [False, True])
def test_several_processes_write_what_one_writes(tmp_path, pairs, collective):
    run(tmp_path / "one", pairs, 0, 1, collective=False)
    whole = contents(tmp_path / "one")
    assert len(whole) == 5
    found = {}
    for rank in range(2):
        folder = tmp_path / f"rank-{rank}"
        run(folder, pairs, rank, 2, collective=collective)
        assert not found.keys() & contents(folder).keys()
        found |= contents(folder)
    assert found == whole


def test_shards_are_gathered_by_all_processes_as_often(tmp_path, pairs):
    models = [run(tmp_path / f"rank-{rank}", pairs, rank, 3, collective=True) for rank in range(3)]
    assert len(names(tmp_path / "rank-0")) > len(names(tmp_path / "rank-2"))
    passes = {model.passes for model in models}
    assert len(passes) == 1


def test_a_process_with_nothing_to_do_loads_nothing_unless_others_need_it(tmp_path, pairs):
    few = pairs[:4]
    assert run(tmp_path / "alone", few, 1, 2, collective=False) is None
    assert run(tmp_path / "together", few, 1, 2, collective=True).passes > 0
    assert names(tmp_path / "together") == []


@pytest.mark.parametrize("collective", [False, True])
def test_a_retry_computes_the_missing_parts_alone(tmp_path, pairs, collective):
    folder = tmp_path / "parts"
    whole = run(folder, pairs, 0, 1, collective=collective).passes
    before = contents(folder)
    assert run(folder, pairs, 0, 1, collective=collective) is None
    (folder / names(folder)[2]).unlink()
    assert 0 < run(folder, pairs, 0, 1, collective=collective).passes < whole
    assert contents(folder) == before
    assert len(read_reference(sorted(folder.glob("part-*.parquet")))) == len(pairs)


def test_a_stop_ends_it_after_a_pass(tmp_path, pairs):
    with pytest.raises(StoppedError):
        run(tmp_path / "parts", pairs, 0, 2, collective=True, stop=lambda: True)
