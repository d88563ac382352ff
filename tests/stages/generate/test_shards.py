from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.generate.chunks import split_chunks
from stages.generate.shards import shard_bounds


@given(st.integers(0, 1000), st.integers(1, 50))
def test_shards_are_balanced_and_lose_no_row(rows, shards):
    bounds = [shard_bounds(rows, index, shards) for index in range(shards)]
    assert [row for first, stop in bounds for row in range(first, stop)] == list(range(rows))
    sizes = [stop - first for first, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_chunks_cover_a_shard(tmp_path):
    chunks = split_chunks(tmp_path, 3, 10, 4)
    assert [(chunk.first, chunk.stop) for chunk in chunks] == [(3, 7), (7, 10)]
    assert [len(chunk) for chunk in chunks] == [4, 3]


def test_chunks_of_another_size_have_other_files(tmp_path):
    paths = {chunk.path for chunk in split_chunks(tmp_path, 0, 8, 4)}
    assert paths.isdisjoint({chunk.path for chunk in split_chunks(tmp_path, 0, 8, 2)})
