"""Files of a folder that make up its digest."""

from __future__ import annotations

from stages.contract.digests import files_of


def write(place, *names):
    for name in names:
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)


def test_hidden_files_and_folders_do_not_count_at_any_depth(tmp_path):
    seen = ("config.json", "parts/deep/model.safetensors", "parts/v1.0/tokenizer.json")
    hidden = (
        ".gitattributes",
        "parts/.DS_Store",
        # As a download from a model hub leaves it, with times that differ between machines.
        ".cache/huggingface/download/config.json.metadata",
        "parts/.git/objects/ab/cdef",
    )
    write(tmp_path, *seen, *hidden)
    assert [each.relative_to(tmp_path).as_posix() for each in files_of(tmp_path)] == list(seen)


def test_the_folder_itself_may_be_hidden(tmp_path):
    place = tmp_path / ".models"
    write(place, "config.json", "parts/model.safetensors")
    assert files_of(place) == [place / "config.json", place / "parts/model.safetensors"]
