"""Texts from which nothing can be learned, each refused in one line, and those that must not be."""

import base64
import bz2
import gzip
import io
import lzma
import random
import zipfile
from pathlib import Path

import pytest

import posenc
from posenc.compare.options import Options
from posenc.compare.plan.check_text import check_content
from posenc.compare.plan.plan import make_plan
from posenc.files.find_texts import find_text

DOCS = Path(__file__).parents[3] / "docs"
PROSE = (DOCS / "compare.md").read_bytes()
RNG = random.Random(0)
NOISE = RNG.randbytes(40_000)
LINE = b"the quick brown fox jumps over the lazy dog.\n"


def zipped() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as file:  # stored, so that its bytes are those of the text
        file.writestr("text.txt", PROSE)
    return held.getvalue()


REFUSED = {
    "text.gz": (gzip.compress(PROSE), r"text\.gz is a gzip file, no text\. Unpack it, or write"),
    "text.bz2": (bz2.compress(PROSE), "is a bzip2 file"),
    "text.xz": (lzma.compress(PROSE), "is a xz file"),
    "text.zip": (zipped(), "is a zip file, no text"),
    "text.zst": (b"\x28\xb5\x2f\xfd" + NOISE, "is a Zstandard file"),
    "text.parquet": (b"PAR1\x15\0" + PROSE + b"PAR1", "is a Parquet file, no text. Unpack it, or"),
    "book.pdf": (b"%PDF-1.7\n" + NOISE, "is a PDF file"),
    "photo.png": (b"\x89PNG\r\n\x1a\n" + NOISE, "photo.png is compressed, encrypted or random"),
    "secret": (NOISE, "secret is compressed, encrypted or random: zlib makes its bytes no smaller"),
    "key": (NOISE[:2000], "key is compressed, encrypted or random"),
    "mostly": (PROSE[:2000] + NOISE * 20, "mostly is compressed, encrypted or random"),
    "zeros": (bytes(50_000), r"nothing to learn in zeros: it is one byte, b'\\x00', again"),
    "letters": (b"a" * 20_000, "nothing to learn in letters: it is one byte, b'a', again and ag"),
    "short": (b"the cat sat on the mat. " * 200, "short: it repeats itself: zlib packs 4,800 by"),
    "line": (LINE * 400, r"nothing to learn in line: it repeats itself: zlib packs 18,000 bytes"),
    "page": (PROSE[:3000] * 400, "page: it repeats itself: zlib packs 1,048,576 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_text_without_a_lesson_has_its_sentence(tmp_path, name):
    content, said = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        check_content(find_text([str(tmp_path / name)]))
    assert str(refused.value).startswith("--text: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["text.gz", "photo.png", "secret"])
def test_one_such_file_in_a_folder_of_texts_is_named(tmp_path, name):
    for i in range(3):
        (tmp_path / f"{i}.md").write_bytes(PROSE[i * 3000 :])
    assert check_content(find_text([str(tmp_path)])) == ""
    (tmp_path / name).write_bytes(REFUSED[name][0])
    with pytest.raises(ValueError, match=f"/{name} is "):
        check_content(find_text([str(tmp_path)]))


def log(count: int) -> bytes:
    """Lines that differ in one digit."""
    return b"".join(
        b"2026-01-31 INFO got /page in %d ms\n" % RNG.randrange(10) for _ in range(count)
    )


ALLOWED = {
    "chinese": (DOCS / "compare.zh-CN.md").read_bytes(),
    "small": PROSE[:1500],
    "too short to tell": b"no " * 20,
    "source": Path(posenc.__file__).with_name("list.py").read_bytes(),
    "dna": bytes(RNG.choices(b"ACGT", k=60_000)),
    "digits": bytes(RNG.choices(b"0123456789", k=60_000)),
    "base64": base64.b64encode(NOISE),
    "log": log(3000),
    "text about PAR1": b"PAR1 opens a Parquet file, BZh one of bzip2. " + PROSE,
    "latin": PROSE.decode().encode("latin-1", "replace") + bytes(range(0xC0, 0x100)) * 9,
    "bytes": bytes(range(1, 256)) * 2,  # too short to be called random
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_only_looks_odd_is_not_refused(tmp_path, name):
    (tmp_path / name).write_bytes(ALLOWED[name])
    assert check_content(find_text([str(tmp_path / name)])) == ""


@pytest.mark.parametrize("content", [PROSE.decode().encode("utf-16"), b"\0\1\0\7" + PROSE])
def test_zero_bytes_are_noted(tmp_path, content):
    (tmp_path / "data").write_bytes(content)
    note = check_content(find_text([str(tmp_path / "data")]))
    said = "data is binary or UTF-16, with zero bytes; it is compared byte by byte"
    assert note.endswith(said)


@pytest.mark.parametrize(("num_files", "noted"), [(2, False), (3, True)])
def test_copies_of_a_file_that_may_be_test_and_training_are_noted(tmp_path, num_files, noted):
    for i, content in enumerate([PROSE, PROSE, PROSE[::-1]][:num_files]):
        (tmp_path / f"{i}.md").write_bytes(content)
    note = check_content(find_text([str(tmp_path)]))
    assert ("1.md looks like a copy of " in note and "0.md; copies" in note) == noted


def test_a_note_on_copies_leaves_that_on_zero_bytes(tmp_path):
    binary = b"\0\1\0\7" + PROSE
    for name, content in {"0.md": binary, "1.md": binary, "2.md": PROSE[::-1]}.items():
        (tmp_path / name).write_bytes(content)
    on_zeros, on_copies = check_content(find_text([str(tmp_path)])).split("byte by byte; ")
    assert on_zeros.endswith("1.md is binary or UTF-16, with zero bytes; it is compared ")
    assert "1.md looks like a copy of " in on_copies


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("text.gz", "text.gz is a gzip file"),
        ("line", "there is nothing to learn in line"),
        ("none/*.txt", "No file has a name like: none/*.txt"),
        (
            "hidden",
            "No file in the folder, apart from hidden ones and comparisons of posenc: hidden",
        ),
        ("tiny", "a window of 128 bytes is longer than the whole text, 5 bytes in 1 file"),
        ("byte", "a window of 128 bytes is longer than the whole text, 1 byte in 1 file"),
        ("empty", "The text is empty: it has 0 bytes in 1 file"),
    ],
)
def test_the_command_says_it_before_anything_is_written(tmp_path, monkeypatch, call, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".text").write_bytes(PROSE)
    (tmp_path / "tiny").write_bytes(b"a b c")
    (tmp_path / "byte").write_bytes(b"a")
    (tmp_path / "empty").write_bytes(b"")
    if name in REFUSED:
        (tmp_path / name).write_bytes(REFUSED[name][0])
    code, _, told = call("compare", "rope", "--text", name, "--out", "out")
    assert code == 2 and said in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_note_is_told_before_training(tmp_path, call):
    (tmp_path / "data").write_bytes(PROSE.decode().encode("utf-16"))
    small = "--dry-run --train-length 16 --test-lengths 16 --batch 1 --width 8 --layers 1 --heads 1"
    _, _, told = call("compare", "nope", "--text", tmp_path / "data", "--steps", 1, *small.split())
    assert "data is binary or UTF-16, with zero bytes" in " ".join(told.split())


def test_a_test_window_longer_than_the_text_is_named_by_its_option(tmp_path, call):
    (tmp_path / "data").write_bytes(PROSE)
    lengths = "--train-length 16 --test-lengths 99999999 --out out".split()
    code, _, told = call("compare", "rope", "alibi", "--text", tmp_path / "data", *lengths)
    assert code == 2
    assert "--test-lengths: a window of 99,999,999 bytes is longer than the whole text" in told


@pytest.mark.parametrize(
    ("encodings", "seeds", "notes"),
    [
        (["rope"], None, ["With one encoding nothing is compared"]),
        (["rope", "alibi"], 1, ["One seed decides nothing"]),
        (["rope"], 1, ["With one encoding nothing is compared", "One seed decides nothing"]),
        (["rope", "alibi"], 2, []),
        (None, None, []),
    ],
)
def test_what_cannot_decide_is_noted_in_the_plan(encodings, seeds, notes):
    plan = make_plan(Options(encodings, seeds=seeds))
    assert [note.split(".")[0].split(":")[0] for note in plan.notes] == notes
