"""The text of a study: what is read, how it is cut, and what is refused."""

import dataclasses
import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import posenc.files.find_texts as sources
from posenc.compare.plan import ngram_losses, splits
from posenc.compare.trial.result_files import SPLITS, folder_of_text
from posenc.compare.trial.windows import read_split
from posenc.files.atomic import mark_figures
from posenc.files.find_texts import find_text, standard_library_text

NEED = splits.MinimumSizes(train_length=8, longest_length=16, batch=2)


def folder_of(root: Path, sizes: dict[str, int]) -> Path:
    for name, size in sizes.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each file's bytes name the file, so that a split tells where it came from.
        path.write_bytes(bytes([sum(name.encode()) % 256]) * size)
    return root


def test_each_file_is_in_one_split_and_nothing_is_lost(tmp_path):
    names = {f"part{i}/file{i}.txt": 100 + i for i in range(30)}
    source = find_text([str(folder_of(tmp_path / "text", names))])
    cut = splits.split_text(source, NEED, tmp_path)
    owners = [name for split in SPLITS for name, _, _ in cut.stretches[split]]
    assert sorted(owners) == sorted(name for name, _ in source.files)
    assert all((a, b) == (0, names[n]) for split in SPLITS for n, a, b in cut.stretches[split])
    assert cut.info.train_bytes + cut.info.valid_bytes + cut.info.test_bytes == sum(names.values())
    assert cut.info.train_bytes > 0.8 * sum(names.values())


def test_split_depends_on_names_below_the_folder_and_not_on_where_it_lies(tmp_path):
    sizes = {f"f{i}": 200 for i in range(12)}
    a = splits.split_text(find_text([str(folder_of(tmp_path / "a", sizes))]), NEED, tmp_path)
    b = splits.split_text(
        find_text([str(folder_of(tmp_path / "deep" / "b", sizes))]), NEED, tmp_path
    )
    assert a.stretches == b.stretches
    assert a.info.hash == b.info.hash


@pytest.mark.parametrize("text", [".", "**/*", "../book"])
def test_what_a_comparison_wrote_is_no_text_of_the_next_one(tmp_path, monkeypatch, text):
    """posenc compare --text . twice: the second run must find the first one's trials again."""
    root = folder_of(tmp_path / "book", {f"f{i}": 200 for i in range(12)})
    monkeypatch.chdir(root)
    before = splits.split_text(find_text([text]), NEED, tmp_path).info.hash
    run = folder_of(root / "runs" / "compare-1", {"report.html": 99, "trials/alibi/log.txt": 9})
    (run / "study.json").write_text('{"format": "posenc study 2", "command": "posenc compare"}')
    figures = folder_of(root / "figures", {"by-length.csv": 300})
    mark_figures(figures)
    folder_of(root / ".hidden", {"file": 400})
    assert splits.split_text(find_text([text]), NEED, tmp_path).info.hash == before
    assert len(find_text(["runs/compare-1/report.html"]).files) == 1  # named by itself
    with pytest.raises(ValueError, match="apart from hidden ones and comparisons of posenc"):
        find_text([str(run)])
    (run / "study.json").write_text('{"format": "my own study", "about": "whales"}')
    assert splits.split_text(find_text([text]), NEED, tmp_path).info.hash != before


def test_hash_sees_one_changed_byte(tmp_path):
    root = folder_of(tmp_path, {f"f{i}": 200 for i in range(12)})
    before = splits.split_text(find_text([str(root)]), NEED, tmp_path).info.hash
    (root / "f3").write_bytes(b"x" * 199 + b"y")
    assert splits.split_text(find_text([str(root)]), NEED, tmp_path).info.hash != before


def test_byte_entropy_is_that_of_all_bytes_and_tells_no_two_texts_apart(tmp_path):
    sizes = {f"f{i}": 100 * (1 + i % 3) for i in range(12)}
    info = splits.split_text(find_text([str(folder_of(tmp_path, sizes))]), NEED, tmp_path).info
    assert info.byte_entropy == pytest.approx(stats.entropy(list(sizes.values()), base=2))
    old = dataclasses.replace(info, byte_entropy=None)
    assert old == info and len({old, info}) == 1


@pytest.mark.parametrize("chunk", [7, 1 << 24])
def test_pair_entropy_is_the_loss_of_a_table_of_pairs_of_the_training_text(
    tmp_path, monkeypatch, chunk
):
    """In plain loops over the text that is trained on, also where it is read in small pieces."""
    monkeypatch.setattr(splits, "_CHUNK_BYTES", chunk)
    steps = np.random.default_rng(1).integers(0, 6, 4000)
    text = (steps.cumsum() % 11).astype(np.uint8).tobytes()
    (tmp_path / "book.bin").write_bytes(text)
    cut = splits.split_text(find_text([str(tmp_path / "book.bin")]), NEED, tmp_path)
    ((_, start, stop),) = cut.stretches["train"]
    trained = text[start:stop]
    follows: dict[int, list[int]] = {}
    for first, second in itertools.pairwise(trained):
        follows.setdefault(first, []).append(second)
    bits = [
        -math.log2(followers.count(second) / len(followers))
        for followers in follows.values()
        for second in followers
    ]
    assert cut.info.pair_entropy == pytest.approx(np.mean(bits))
    assert cut.info.pair_entropy < cut.info.byte_entropy - 0.5
    assert ngram_losses.conditional_entropy(np.zeros((2, 2))) is None


def test_single_file_is_cut_into_contiguous_stretches(tmp_path):
    text = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8).tobytes()
    (tmp_path / "book.bin").write_bytes(text)
    cut = splits.split_text(find_text([str(tmp_path / "book.bin")]), NEED, tmp_path)
    cut.write(tmp_path / "out")
    parts = [read_split(tmp_path / "out", split, cut.info.hash) for split in SPLITS]
    assert all(part[-1] == splits.SEPARATOR for part in parts)
    assert b"".join(part[:-1].astype(np.uint8).tobytes() for part in parts) == text
    assert cut.info.test_bytes == pytest.approx(0.05 * len(text), abs=2)


def test_files_are_joined_by_the_separator(tmp_path):
    root = folder_of(tmp_path / "text", {f"f{i}": 300 for i in range(9)})
    cut = splits.split_text(find_text([str(root)]), NEED, tmp_path)
    cut.write(tmp_path)
    for split in SPLITS:
        symbols = read_split(tmp_path, split, cut.info.hash)
        ends = np.flatnonzero(symbols == splits.SEPARATOR)
        assert ends.tolist() == [301 * (i + 1) - 1 for i in range(len(cut.stretches[split]))]


def test_files_folders_and_globs_name_the_same_text(tmp_path):
    root = folder_of(tmp_path, {f"f{i}.txt": 50 for i in range(4)})
    by_folder = find_text([str(root)]).files
    assert find_text([str(root / "*.txt")]).files == by_folder
    assert find_text([str(p) for p in root.iterdir()]).files == by_folder
    assert find_text([str(root), str(root / "f1.txt")]).files == by_folder  # none twice


def test_hidden_files_are_left_out(tmp_path):
    root = folder_of(tmp_path, {"a.txt": 9, ".git/config": 9, "b/.secret": 9})
    assert [name for name, _ in find_text([str(root)]).files] == ["a.txt"]


def test_name_with_glob_characters_is_a_file_when_it_exists(tmp_path):
    path = tmp_path / "notes [1].txt"
    path.write_bytes(b"x" * 10)
    assert [p for _, p in find_text([str(path)]).files] == [path.resolve()]


def test_missing_file_is_named():
    with pytest.raises(ValueError, match=r"No such file: /nowhere/book\.txt"):
        find_text(["/nowhere/book.txt"])


def test_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="No file in the folder"):
        find_text([str(tmp_path)])


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "The text is empty: it has 0 bytes in 1 file, and at least 226 are needed"),
        (1, "--train-length: a window of 8 bytes is .* text, 1 byte in 1 file; at least 226 "),
        (8, "--train-length: a window of 8 bytes is .* text, 8 bytes in 1 file; at least 226 "),
        (16, "--test-lengths: a window of 16 bytes is .* text, 16 bytes in 1 file; at least 226 "),
        (17, "too short: it has 17 bytes in .* at least 226 "),
        (200, "too short: it has 200 bytes in .* at least 226 "),
    ],
)
def test_short_text_says_how_many_bytes_are_needed(tmp_path, size, said):
    (tmp_path / "a").write_bytes(b"x" * size)
    assert 18 + 72 + 136 == 226  # 2 windows of 9 to train on, 8 of 9 to validate, 8 of 17 to test
    with pytest.raises(ValueError, match=said):
        splits.split_text(find_text([str(tmp_path / "a")]), NEED, tmp_path)


def test_least_text_that_is_said_to_be_enough_is_enough(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (sum(NEED.size_by_split.values()) + 2))  # two roundings
    splits.split_text(find_text([str(tmp_path / "a")]), NEED, tmp_path)


def test_embedded_corpus_is_python_source_without_tests():
    source = standard_library_text()
    names = [name for name, _ in source.files]
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert sum(path.stat().st_size for _, path in source.files) > 5e6


def written(tmp_path):
    (tmp_path / "book.txt").write_bytes(bytes(range(256)) * 20)
    cut = splits.split_text(find_text([str(tmp_path / "book.txt")]), NEED, tmp_path)
    assert cut.write(tmp_path) is None
    return cut, {s: folder_of_text(tmp_path, cut.info.hash) / f"{s}.u16" for s in SPLITS}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "missing"])
def test_damaged_split_is_written_again_and_named(tmp_path, split, damage):
    cut, paths = written(tmp_path)
    good = paths[split].read_bytes()
    if damage == "missing":
        paths[split].unlink()
    else:
        bad = {"flip": good[:-9] + bytes([good[-9] ^ 1]) + good[-8:], "cut": good[:-2]}
        paths[split].write_bytes(bad.get(damage, good + b"ab"))
    reason = cut.write(tmp_path)
    assert reason is not None and str(paths[split]) in reason
    assert paths[split].read_bytes() == good
    assert cut.write(tmp_path) is None


def test_whole_splits_are_not_written_again(tmp_path):
    cut, paths = written(tmp_path)
    before = [path.stat().st_mtime_ns for path in paths.values()]
    assert cut.write(tmp_path) is None
    assert [path.stat().st_mtime_ns for path in paths.values()] == before


@pytest.mark.parametrize("content", [b"x" * 5120, b"x" * 100])
def test_text_that_changes_after_it_was_cut_is_refused(tmp_path, content):
    (tmp_path / "book.txt").write_bytes(bytes(range(256)) * 20)
    cut = splits.split_text(find_text([str(tmp_path / "book.txt")]), NEED, tmp_path)
    (tmp_path / "book.txt").write_bytes(content)
    os.utime(tmp_path / "book.txt", ns=(1, 1))
    with pytest.raises(ValueError, match=r"book\.txt (changed while|ends after 100 bytes)"):
        cut.write(tmp_path)
    assert not list(tmp_path.glob("corpus-*"))


def test_text_beyond_the_disk_is_refused_before_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "huge").write_bytes(b"")
    os.truncate(tmp_path / "huge", 1 << 42)  # sparse: takes no room
    monkeypatch.setattr(splits, "_read_chunks", lambda *arguments: pytest.fail("read"))
    usage = splits.shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
    monkeypatch.setattr(splits.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ValueError, match=r"need at least 8,192\.0 GiB of disk, and there are 1,024\.0"
    ):
        splits.split_text(find_text([str(tmp_path / "huge")]), NEED, tmp_path / "not" / "made")


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/urandom", "pipe"])
def test_what_has_no_end_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a device, not an ordinary file"):
        find_text([str(tmp_path / name)])


def test_pipes_in_a_folder_or_glob_are_left_out(tmp_path):
    root = folder_of(tmp_path / "text", {"a.txt": 9})
    os.mkfifo(root / "pipe")
    (root / "broken").symlink_to("nowhere")
    for text in (root, root / "*"):
        assert [name for name, _ in find_text([str(text)]).files] == ["a.txt"]


def test_no_more_than_a_bounded_number_of_files(tmp_path, monkeypatch):
    root = folder_of(tmp_path, {f"f{i}": 1 for i in range(4)})
    monkeypatch.setattr(sources, "MAX_FILES", 3)
    with pytest.raises(ValueError, match="more than 3 files"):
        find_text([str(root)])


def test_file_that_claims_no_size_is_not_read(tmp_path):
    source = find_text(["/proc/cpuinfo"])  # has lines, and says that it has 0 bytes
    with pytest.raises(ValueError, match="it has 0 bytes"):
        splits.split_text(source, NEED, tmp_path)


def test_name_in_no_encoding_is_a_name(tmp_path):
    for name in (b"caf\xe9", "道".encode()):
        path = os.fsencode(tmp_path) + b"/" + name
        Path(os.fsdecode(path)).write_bytes(b"x" * 1000)
        cut = splits.split_text(find_text([os.fsdecode(path)]), NEED, tmp_path)
        assert cut.info.name == name.decode("utf-8", "surrogateescape")
