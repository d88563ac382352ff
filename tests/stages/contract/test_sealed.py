"""Files of a work folder: whole with the digest that fits, or set aside."""

from pathlib import Path

import pytest

from stages.contract.digests import find_whole, sealed_path


def write(path: Path, text: str) -> None:
    with sealed_path(path) as scratch:
        scratch.write_text(text)


def test_a_file_is_whole_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "work" / "part.parquet"
    assert not find_whole(path, pytest.fail)
    for text in ("one", "two", "three"):
        write(path, text)
        assert find_whole(path, pytest.fail)
    assert path.read_text() == "three"
    assert len(list(path.parent.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"on", b"one ", b"onf", b"\xff"])
def test_one_that_differs_is_set_aside_with_a_warning(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "part.parquet"
    write(path, "one")
    path.write_bytes(content)
    warnings: list[str] = []
    assert not find_whole(path, warnings.append)
    assert not path.exists()
    [said] = warnings
    assert str(path) in said
    [aside] = tmp_path.glob("damaged-*")
    assert aside.name in said
    assert aside.read_bytes() == content


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"0" * 64])
def test_one_whose_digest_is_lost_is_not_used(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "part.parquet"
    write(path, "one")
    [seal] = tmp_path.glob(".part*")
    seal.unlink()
    if content is not None:
        seal.write_bytes(content)
    assert not find_whole(path, lambda _: None)


@pytest.mark.parametrize("moment", ["before the digest", "before the rename"])
def test_a_kill_leaves_the_file_before_with_a_digest_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "part.parquet"
    write(path, "one")
    replace = Path.replace

    def killed(scratch: Path, target: Path) -> Path:
        if moment == "before the digest" or target == path:
            raise KeyboardInterrupt
        return replace(scratch, target)

    for text in ("two", "three", "four"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "replace", killed)
            write(path, text)
        assert find_whole(path, pytest.fail)
        assert path.read_text() == "one"
    write(path, "five")
    assert find_whole(path, pytest.fail)
