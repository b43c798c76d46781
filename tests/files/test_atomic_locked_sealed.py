"""Files that a later run reads: whole or not there, sealed, and in one process's hands."""

import ast
import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from posenc.files.atomic import is_partial, prepare_file, remove_partials, write_atomically
from posenc.files.folders import locked
from posenc.files.sealed_json import Record, seal, unseal


@dataclass(frozen=True)
class Score(Record):
    name: str
    bits: float
    seeds: int = 1


def test_what_was_sealed_comes_back():
    score = Score("名 <b>", 0.1 + 0.2)
    assert Score.from_json(score.to_json()) == score
    assert "名" in score.to_json()


@pytest.mark.parametrize(
    ("old", "new"),
    [("1.25", "1.26"), ("rope", "alibi"), ('"seeds": 1', '"seeds": 2'), ('"bits"', '"bats"')],
)
def test_a_changed_digit_name_or_key_is_seen(old, new):
    text = Score("rope", 1.25).to_json()
    assert old in text
    with pytest.raises(ValueError, match="its hash differs"):
        Score.from_json(text.replace(old, new))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "rope", "bits": 1.0, "seeds": 1}', "has no sha256"),
        ('{"name": "rope", "bits": NaN, "seeds": 1}', "NaN"),
        ('{"bits": -Infinity}', "-Infinity"),
        ("[1]", "expected an object, got list"),
        ("[" * 100_000, "nested too deeply"),
        ("", "Expecting value"),
        ("{", "Expecting"),
    ],
)
def test_what_is_no_sealed_record_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Score.from_json(text)


def test_sealed_record_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="missing or unknown fields: bits, loss"):
        Score.from_json(seal({"name": "rope", "loss": 1.0, "seeds": 1}))
    with pytest.raises(ValueError, match=r"Score\.seeds: expected a number, got True"):
        Score.from_json(seal({"name": "rope", "bits": 1.0, "seeds": True}))


@dataclass(frozen=True)
class Scores(Record):
    name: str
    scores: tuple[Score, ...] = ()
    losses: tuple[float, ...] = ()
    spec: dict[str, str] | None = None


def test_the_hash_is_that_of_the_whole_text_with_sorted_keys():
    record = Scores(
        "b", (Score("é\ud800", 0.1), Score("t5", 1e-9)), (2.0, 0.5), {"z": "1", "a": ""}
    )
    text = record.to_json().encode(errors="replace").decode()
    content = json.loads(text)
    sealed_hash = content.pop("sha256")
    whole = json.dumps(content, sort_keys=True)
    assert sealed_hash == hashlib.sha256(whole.encode()).hexdigest()
    assert Scores.from_json(text).scores[0].name == "é?"


def test_an_object_of_a_list_has_a_line_and_numbers_have_none():
    text = Scores("b", (Score("rope", 1.0), Score("t5", 2.0)), (2.0, 0.5)).to_json()
    lines = text.splitlines()
    assert len(lines) == 10 and lines[4] == '  {"name": "rope", "bits": 1.0, "seeds": 1},'
    assert ' "losses": [2.0, 0.5],' in lines


@pytest.mark.parametrize("losses", ["[1.0, true]", "[1.0, 1e300]", '[1.0, "2"]', "[[1.0]]"])
def test_a_list_of_plain_numbers_is_read_as_strictly_as_others(losses):
    content = json.loads(f'{{"name": "b", "losses": {losses}}}')
    with pytest.raises(ValueError, match="losses"):
        Scores.from_json(seal(content))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_not_written(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Score("rope", value).to_json()


def test_lone_surrogates_do_not_break_the_seal(tmp_path):
    path = tmp_path / "record.json"
    write_atomically(path, seal({"name": "caf\udce9"}))
    assert unseal(path.read_text(encoding="utf-8")) == {"name": "caf?"}


def test_partial_files_are_removed_wherever_they_lie_and_nothing_else(tmp_path):
    below = tmp_path / "trial" / "huggingface"
    below.mkdir(parents=True)
    partial = [
        folder / f".{name}.{17:016x}.partial"
        for folder, name in ((tmp_path, "study.json"), (below, "model.safetensors"))
    ]
    kept = [tmp_path / "notes.partial", below / ".hidden", below / ".x.partial"]
    for path in partial + kept:
        path.write_bytes(b"x")
    assert all(map(is_partial, partial)) and not any(map(is_partial, kept))
    remove_partials(tmp_path)
    assert [p.exists() for p in partial + kept] == [False, False, True, True, True]


def test_what_a_killed_write_leaves_is_a_partial_file(tmp_path):
    code = (
        "import os, sys\n"
        "from posenc.files.atomic import write_atomically\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), 9)\n"
        "write_atomically(sys.argv[1], 'new')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "study.json")], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert is_partial(left)


def test_writable_is_checked_without_leaving_a_file(tmp_path):
    prepare_file(tmp_path / "new" / "rows.csv")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(OSError, match="is a folder; name a file in it"):
        prepare_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="not an ordinary file"):
            prepare_file(special)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError):
        prepare_file(tmp_path / "file" / "below.csv")


def test_folder_is_locked_for_one_process(tmp_path):
    with locked(tmp_path, "posenc compare"):
        with pytest.raises(ValueError, match="Another posenc compare is running"):
            with locked(tmp_path, "posenc compare"):
                pass
    with locked(tmp_path, "posenc compare"):
        pass


def text_without_encoding(source: str) -> list[int]:
    """Lines that open a text file and leave its encoding to the locale."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in ("open", "fdopen", "read_text", "write_text"):
            continue
        if isinstance(node.func, ast.Attribute) and name == "open":
            if ast.unparse(node.func.value) in ("os", "browser"):  # a descriptor; a page
                continue
        literals = [a.value for a in node.args if isinstance(a, ast.Constant)]
        binary = any(isinstance(mode, str) and "b" in mode and len(mode) < 4 for mode in literals)
        if not binary and not any(k.arg == "encoding" for k in node.keywords):
            lines.append(node.lineno)
    return lines


@pytest.mark.prose
def test_every_text_file_names_its_encoding():
    planted = "p.read_text()\np.open('w')\nos.fdopen(3, 'w')\np.open('rb')\nos.open(a, b)\n"
    planted += "browser.open(a)\n"
    assert text_without_encoding(planted + "p.write_text(t, encoding='utf-8')") == [1, 2, 3]
    root = Path(__file__).parent.parent.parent
    found = [
        f"{path.relative_to(root)}:{line}"
        for folder in ("posenc", "experiments", "docs")
        for path in sorted((root / folder).rglob("*.py"))
        for line in text_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == []
