"""Token files: the same bytes for any number of processes and after any interruption."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data.mixture import Mixture
from jaxtrain.data.token_file import (
    TokenDocument,
    TokenFiles,
    TokenStore,
    merge_token_files,
    open_token_file,
    write_token_file,
)
from jaxtrain.data.tokenization import tokenize
from jaxtrain.files.array_file import DamagedFile, whole, write_arrays
from jaxtrain.sources import JsonLines, TextFiles, documents
from jaxtrain.telemetry.progress import progress_bar
from jaxtrain.tokenizers import ByteTokenizer


@dataclass(frozen=True)
class Interrupted(TextFiles):
    """Stops, as Ctrl-C does, at the file of this name."""

    stop_at: str = ""

    def read(self, piece, split):
        if piece.path.endswith(self.stop_at):
            raise KeyboardInterrupt
        return super().read(piece, split)


@pytest.fixture
def source(tmp_path: Path) -> TextFiles:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        text = f"file {i}\n" * (i + 1) if i != 4 else ""
        (folder / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    return TextFiles(str(folder / "*.txt"), held_out=0.0)


def documents_of(path: Path) -> list[list[int]]:
    file = open_token_file(path)
    return [
        file.tokens[a:b].tolist() for a, b in zip(file.offsets[:-1], file.offsets[1:], strict=True)
    ]


def test_documents_come_back_each_with_eos(source: TextFiles, tmp_path: Path) -> None:
    tokenize(source, ByteTokenizer(), tmp_path / "out.tokens", shard_bytes=50)
    expected = [[*d.text.encode(), 256] for d in documents(source, "train")]
    assert documents_of(tmp_path / "out.tokens") == expected
    assert len(expected) == 11, "the empty file is no document"
    assert not (tmp_path / "out.tokens.parts").exists()


def test_the_bytes_do_not_depend_on_processes_shards_or_interruptions(
    source: TextFiles, tmp_path: Path
) -> None:
    tokenize(source, ByteTokenizer(), tmp_path / "one.tokens", shard_bytes=100)
    tokenize(source, ByteTokenizer(), tmp_path / "big.tokens")
    tokenize(source, ByteTokenizer(), tmp_path / "two.tokens", shard_bytes=100, processes=2)
    expected = (tmp_path / "one.tokens").read_bytes()
    assert (tmp_path / "big.tokens").read_bytes() == expected
    assert (tmp_path / "two.tokens").read_bytes() == expected


def test_an_interrupted_job_goes_on_with_the_missing_shards(
    source: TextFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(source, ByteTokenizer(), tmp_path / "whole.tokens", shard_bytes=50)
    out, read = tmp_path / "out.tokens", TextFiles.read

    def stop(self, piece, split):
        if piece.path.endswith("08.txt"):
            raise KeyboardInterrupt
        return read(self, piece, split)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TextFiles, "read", stop)
        tokenize(source, ByteTokenizer(), out, shard_bytes=50)
    finished = sorted((tmp_path / "out.tokens.parts").glob("*.tokens"))
    assert len(finished) >= 3 and not out.exists()
    # One of the finished shards is damaged meanwhile: it alone is made again.
    victim = finished[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    seen = []

    def record(self, piece, split):
        seen.append(piece.path[-6:])
        return read(self, piece, split)

    monkeypatch.setattr(TextFiles, "read", record)
    steps: list[tuple[int, int]] = []
    tokenize(
        source, ByteTokenizer(), out, shard_bytes=50, progress=lambda a, b: steps.append((a, b))
    )
    assert out.read_bytes() == (tmp_path / "whole.tokens").read_bytes()
    assert "00.txt" in seen and "08.txt" in seen and "06.txt" not in seen
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == steps[-1][1] > 0


def test_shards_of_another_job_are_refused(source: TextFiles, tmp_path: Path) -> None:
    stopped = Interrupted(source.patterns, held_out=0.0, stop_at="08.txt")
    out = tmp_path / "out.tokens"
    with pytest.raises(KeyboardInterrupt):
        tokenize(stopped, ByteTokenizer(), out, shard_bytes=50)
    with pytest.raises(ValueError, match="begun with a different corpus, source, shard_bytes"):
        tokenize(source, ByteTokenizer(), out, shard_bytes=60)


def test_a_finished_file_is_opened_not_made_again(source: TextFiles, tmp_path: Path) -> None:
    out = tmp_path / "out.tokens"
    digest = tokenize(source, ByteTokenizer(), out).digest
    stopped = Interrupted(source.patterns, stop_at=".txt")
    assert tokenize(stopped, ByteTokenizer(), out).digest == digest
    write_token_file(out, [TokenDocument(np.array([1]))], vocab=257, tokenizer="other")
    with pytest.raises(ValueError, match="written by another tokenizer"):
        tokenize(source, ByteTokenizer(), out)


def test_an_empty_corpus_and_bad_arguments_are_refused(source: TextFiles, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"held_out=0 of TextFiles.* holds no document out: use"):
        tokenize(source, ByteTokenizer(), tmp_path / "a", split="held_out")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"split 'train' of JsonLines.* has no text"):
        tokenize(JsonLines(str(tmp_path / "empty.jsonl")), ByteTokenizer(), tmp_path / "a")
    assert not list(tmp_path.glob("a*"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"a cannot be made: .* Not a directory"):
        tokenize(source, ByteTokenizer(), tmp_path / "file" / "a")
    with pytest.raises(ValueError, match="tokenise the source of each part"):
        tokenize(Mixture(((1.0, source),)), ByteTokenizer(), tmp_path / "a")
    with pytest.raises(ValueError, match="processes=0"):
        tokenize(source, ByteTokenizer(), tmp_path / "a", processes=0)


def test_an_error_in_a_worker_reaches_the_caller(source: TextFiles, tmp_path: Path) -> None:
    bad = Path(source.pieces("train")[-1].path)
    bad.write_bytes(b"abc\xff" * 30)
    with pytest.raises(ValueError, match=r"11\.txt is not UTF-8 at byte 3"):
        tokenize(source, ByteTokenizer(), tmp_path / "o", processes=2, shard_bytes=400)


def test_prompts_are_counted_in_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "\u00e9?", "text": "yes"}\n{"q": "", "text": "no"}\n')
    source = JsonLines(str(tmp_path / "a.jsonl"), prompt_field="q", held_out=0.0)
    file = tokenize(source, ByteTokenizer(), tmp_path / "o.tokens")
    assert file.prompts.tolist() == [3, 0]
    assert documents_of(tmp_path / "o.tokens") == [[*"\u00e9?yes".encode(), 256], [*b"no", 256]]


def test_the_progress_bar_takes_bytes(capsys: pytest.CaptureFixture) -> None:
    with progress_bar("reading") as progress:
        progress(5, 10)
        progress(10, 10)
    assert "reading" in capsys.readouterr().out


@pytest.mark.parametrize("vocab, dtype", [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(
    vocab: int, dtype: type, tmp_path: Path
) -> None:
    path = tmp_path / "x.tokens"
    write_token_file(path, [TokenDocument(np.array([vocab - 1, 0]))], vocab=vocab)
    assert open_token_file(path).tokens.dtype == dtype
    assert open_token_file(path).tokens.tolist() == [vocab - 1, 0]


@pytest.mark.parametrize("bad", [-1, 10, 70000])
def test_an_id_outside_the_vocabulary_is_named(bad: int, tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    good = [TokenDocument(np.array([1, 2, 3])), TokenDocument(np.array([4, bad]))]
    with pytest.raises(ValueError, match=rf"x\.tokens: token 4 is id {bad}, outside .* of 10"):
        write_token_file(path, good, vocab=10)
    assert not path.exists()
    arrays = {
        "tokens": whole(np.array([1, 2, 3, 4, 10], dtype=np.uint16)),
        "offsets": whole(np.array([0, 3, 5])),
        "prompts": whole(np.array([0, 0])),
    }
    meta = {"format": 1, "vocab": 10, "tokenizer": ""}
    write_arrays(path, kind="tokens", meta=meta, arrays=arrays)
    with pytest.raises(ValueError, match="token 4 is id 10"):
        open_token_file(path)


@pytest.mark.parametrize(
    "arrays, meta",
    [({"offsets": np.array([0, 4])}, {}), ({"prompts": np.array([0, 0])}, {}), ({}, {"format": 9})],
)
def test_a_file_that_contradicts_itself_is_refused(arrays, meta, tmp_path: Path) -> None:
    parts = {"tokens": np.zeros(3, np.uint16), "offsets": np.array([0, 3])}
    parts = {**parts, "prompts": np.array([0]), **arrays}
    meta = {"format": 1, "vocab": 10, "tokenizer": "", **meta}
    specs = {name: whole(array) for name, array in parts.items()}
    write_arrays(tmp_path / "x", kind="tokens", meta=meta, arrays=specs)
    with pytest.raises(DamagedFile, match=r"do not add up|format 9"):
        open_token_file(tmp_path / "x")


def three_files(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [folder / f"{name}.tokens" for name in "abc"]
    for path in paths:
        ids = [TokenDocument(rng.integers(0, 256, rng.integers(1, 9))) for _ in range(50)]
        write_token_file(path, ids, vocab=257, tokenizer="bytes")
    return paths


def test_several_files_read_as_their_concatenation(tmp_path: Path) -> None:
    files = [open_token_file(path) for path in three_files(tmp_path)]
    merge_token_files(files, tmp_path / "merged.tokens")
    merged = open_token_file(tmp_path / "merged.tokens")
    together = TokenStore(files=tuple(files), documents=None)
    one = TokenStore(files=(merged,), documents=None)
    np.testing.assert_array_equal(together.starts, one.starts)
    np.testing.assert_array_equal(together.lengths, one.lengths)
    addresses = np.random.default_rng(1).permutation(len(merged.tokens)).reshape(1, -1)
    np.testing.assert_array_equal(together.gather(addresses), merged.tokens[addresses])
    np.testing.assert_array_equal(one.gather(addresses), merged.tokens[addresses])


def test_token_files_split_by_document_or_by_file(tmp_path: Path) -> None:
    three_files(tmp_path)
    pattern = str(tmp_path / "*.tokens")
    by_document = TokenFiles(pattern, held_out=0.2)
    starts = {
        split: set(by_document.store(split, vocab=257, tokenizer="bytes").starts.tolist())
        for split in ("train", "held_out")
    }
    assert len(starts["train"] | starts["held_out"]) == 150
    assert not starts["train"] & starts["held_out"]
    assert 10 <= len(starts["held_out"]) <= 50
    by_file = TokenFiles(pattern, held_out_paths=str(tmp_path / "c.tokens"))
    train = by_file.store("train", vocab=257, tokenizer="bytes")
    assert [f.path.name for f in train.files] == ["a.tokens", "b.tokens"]
    assert by_file.store("held_out", vocab=257, tokenizer="bytes").files[0].path.stem == "c"


def test_token_files_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    paths = three_files(tmp_path)
    with pytest.raises(ValueError, match=r"a\.tokens was written by another.*; .*b\.tokens"):
        TokenFiles((str(paths[0]), str(paths[1]))).store("train", vocab=257, tokenizer="abc")
    write_token_file(paths[0], [TokenDocument(np.array([5, 256]))], vocab=257)
    with pytest.raises(ValueError, match="token 1 is id 256, outside the vocabulary of 256"):
        TokenFiles(str(paths[0])).store("train", vocab=256, tokenizer="abc")
    with pytest.raises(ValueError, match="no document is left"):
        TokenFiles(str(paths[0]), held_out=0.0).store("held_out", vocab=257, tokenizer="bytes")
    with pytest.raises(ValueError, match="only token files of one tokenizer"):
        merge_token_files([open_token_file(p) for p in paths], tmp_path / "m")
