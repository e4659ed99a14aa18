"""Sources of text: the standard library, a file, a folder; how they are cut into documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vocabpar.train import corpus as source
from megatron_vocabpar.train.corpus import check_source, is_indexed_dataset, read_corpus


def test_standard_library() -> None:
    corpus = read_corpus(None)
    assert sum(map(len, corpus.documents)) == source.LIBRARY_CHARACTERS
    assert max(map(len, corpus.documents)) <= source.LONGEST_PIECE
    assert all("\0" not in document for document in corpus.documents)
    assert sum("    def " in document for document in corpus.documents) > 50
    assert read_corpus(None).digest == corpus.digest


@pytest.mark.parametrize(
    "line", ["a line of text, number %d\n", "%d " * 1000, "ein Satz mit Umlauten äöü %d\r\n"]
)
def test_a_file_is_cut_and_nothing_is_lost(tmp_path: Path, line: str) -> None:
    content = "".join(line.replace("%d", str(number)) for number in range(3000))
    path = tmp_path / "text"
    path.write_bytes(content.encode())
    documents = read_corpus(str(path)).documents
    assert "".join(documents) == content
    assert len(documents) >= source.PIECES_WANTED
    if "\n" in line:
        assert all(document.endswith("\n") for document in documents)


def test_a_short_file_is_still_several_documents(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("word word word\n" * 100)
    assert len(read_corpus(str(path)).documents) == 3


def test_a_folder_skips_what_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b" / "c.md").write_text("second")
    (tmp_path / "b" / "d.bin").write_bytes(b"\0\1")
    (tmp_path / "blank.txt").write_text("\n\n")
    assert sorted(read_corpus(str(tmp_path)).documents) == ["first", "second"]


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(b"\0\1")
    with pytest.raises(ValueError, match="holds no text file"):
        read_corpus(str(tmp_path))


def test_binary_after_a_start_that_is_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"plain\n" * 20_000 + b"\xff\0")
    check_source(str(path))
    with pytest.raises(ValueError, match="is not text"):
        read_corpus(str(path))


def test_a_character_across_the_end_of_what_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a" + "ä".encode() * 100_000)
    check_source(str(path))
    assert sum(map(len, read_corpus(str(path)).documents)) == 100_001


def test_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_CHARACTERS", 1000)
    path = tmp_path / "text"
    path.write_text("0123456789\n" * 1000)
    assert sum(map(len, read_corpus(str(path)).documents)) == 1000


def test_an_indexed_dataset_is_named_without_its_endings(tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").write_bytes(b"\0")
    assert is_indexed_dataset(str(tmp_path / "data"))
    assert not is_indexed_dataset(str(tmp_path / "data.bin"))
    with pytest.raises(ValueError, match=f"give --text {tmp_path / 'data'}"):
        check_source(str(tmp_path / "data.bin"))


def test_digests_tell_cuts_apart() -> None:
    assert source.Corpus("a", ("ab", "c")).digest != source.Corpus("a", ("a", "bc")).digest
