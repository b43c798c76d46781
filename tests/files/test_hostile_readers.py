"""Every reader meets pipes, sockets, devices, folders, depth, digits and counts that a file cannot
hold: one line that names the file, at once and with little memory."""

import json
import os
import socket
import struct
import time
import tracemalloc
from dataclasses import replace

import pytest

from posenc.compare.reports.report_runs import report_runs
from posenc.compare.results import FORMAT, LengthScore, Study, Timing, TrialResult
from posenc.compare.run_study import check_out_folder
from posenc.compare.trial.config import read_trial
from posenc.compare.trial.result_files import CorruptResult, load_result
from posenc.extend.api import read_documents
from posenc.extend.export.folder import copy_sentence_transformers_files
from posenc.files.sealed_json import unseal
from posenc.hf.restart_state import read_sealed
from posenc.runtimes.files.gguf_metadata import read_metadata
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.model_folder import read_safetensors_header
from posenc.runtimes.files.source import load
from tests.doctor.test_gguf_hostile import ARRAY, SOUND, STRING, U32, header, text
from tests.experiment import experiment
from tests.files.test_hostile_writers import TRIAL

read_rows = experiment("published_trials").read_rows


def result(path):
    load_result(path.parent.parent, TRIAL)


READERS = {
    "config": ("config.json", load),
    "JSON": ("a.json", read_json),
    "safetensors": ("model.safetensors", read_safetensors_header),
    "study": ("study.json", lambda path: report_runs([path.parent])),
    "result": ("result.json", result),
    "trial": ("config.json", lambda path: read_trial(path.parent)),
    "rows": ("rows.jsonl", read_rows),
    "text": ("text.txt", lambda path: read_documents([path])),
}
"""Files that others may have written: a name, and what reads it."""


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / TRIAL.folder
    folder.mkdir()
    return folder


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_what_is_no_ordinary_file_is_refused(home, monkeypatch, reader, kind):
    name, read = READERS[reader]
    monkeypatch.chdir(home)
    with socket.socket(socket.AF_UNIX) as bound:
        if kind == "pipe":
            os.mkfifo(name)
        elif kind == "socket":
            bound.bind(name)
        elif kind == "device":
            (home / name).symlink_to("/dev/zero")
        else:
            (home / name).mkdir()
        words = r"not an ordinary|not a file|expected config|holds no study|a folder"
        with pytest.raises((ValueError, CorruptResult), match=words) as refused:
            read(home / name)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_state_that_is_no_ordinary_file_is_done_again(home, caplog, kind):
    path = home / "search.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    if kind == "folder":  # which is not deleted
        with pytest.raises(OSError):
            read_sealed(path, {})
    else:
        assert read_sealed(path, {}) is None
        assert "not an ordinary file" in caplog.text


DEEP, LONG = '{"a":' * 900 + "1" + "}" * 900, '{"rope_theta": ' + "9" * 400 + "}"
TEXTS = {
    "900 deep": (DEEP, "nested more than 64 times"),
    "5,000 lists deep": ("[" * 5000 + "]" * 5000, "nested"),
    "400 digits": (LONG, "a number of 400 digits, expected at most 300"),
    "a key twice": ('{"a": 1, "a": 2}', "given twice, with two values"),
    "a list": ("[1]", "expected"),
    "not ended": ('{"a": ', "JSON"),
}
JSON_READERS = {
    "JSON": ("a.json", read_json),
    "config": ("config.json", load),
    "study": ("study.json", lambda path: report_runs([path.parent])),
    "result": ("result.json", result),
    "sealed": ("a.json", lambda path: unseal(path.read_text())),
    "safetensors": ("model.safetensors", read_safetensors_header),
}


@pytest.mark.parametrize("reader", JSON_READERS)
@pytest.mark.parametrize("content", ["900 deep", "5,000 lists deep", "400 digits"])
def test_depth_and_digits_are_bounded(home, reader, content):
    name, read = JSON_READERS[reader]
    said, words = TEXTS[content]
    data = said.encode()
    if reader == "safetensors":
        data = struct.pack("<Q", len(data)) + data
    (home / name).write_bytes(data)
    with pytest.raises((ValueError, CorruptResult), match=words):
        read(home / name)


@pytest.mark.parametrize("content", TEXTS)
def test_a_module_list_and_a_config_are_bounded(home, tmp_path, content):
    said, words = TEXTS[content]
    (home / "config.json").write_text(said)
    with pytest.raises(ValueError, match=words):
        load(home)
    (home / "modules.json").write_text(said)
    with pytest.raises(ValueError, match="expected a list of modules"):
        copy_sentence_transformers_files(home, tmp_path, 8)


@pytest.mark.parametrize("name", ["config.json", "study.json", "result.json", "search.json"])
def test_a_file_of_eight_terabytes_is_refused_unread(home, caplog, name):
    path = home / name
    path.touch()
    os.truncate(path, 1 << 43)
    reads = {
        "config.json": load,
        "result.json": result,
        "study.json": lambda p: check_out_folder(p.parent),
    }
    began = time.perf_counter()
    tracemalloc.start()
    try:
        said = reads.get(name, lambda p: read_sealed(p, {}))(path)
    except (ValueError, CorruptResult) as error:
        said = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "8796093022208 bytes, expected at most" in f"{said}{caplog.text}"
    assert time.perf_counter() - began < 2 and peak < 1 << 20


@pytest.mark.parametrize("more", [{"encoding": "a" * 1001}, {"test_lengths": (8,) * 1001}])
def test_no_page_is_drawn_for_endless_names_or_lengths(home, more):
    study = Study(FORMAT, "", "", {}, {}, None, (replace(TRIAL, **more),))
    (home / "study.json").write_text(study.to_json())
    with pytest.raises(ValueError, match=r"expected at most 1,000"):
        report_runs([home])


SCORED = TrialResult(TRIAL, by_length=(LengthScore(8, 2.0),), timing=Timing(1.0, 1.0, 1.0))
WRONG_RESULTS = {
    "expected scores at 8": TrialResult(TRIAL),
    "A trial's objective must be causal, masked or seq2seq, got 'evil'": replace(
        SCORED, config=replace(TRIAL, objective="evil")
    ),
    "expected a number of at most 1e+60, got 1e+308": replace(
        SCORED, by_length=(LengthScore(8, 1e308),)
    ),
}


@pytest.mark.parametrize("said", WRONG_RESULTS)
def test_results_that_no_posenc_writes_are_one_line(home, said, call):
    wrong = WRONG_RESULTS[said]
    study = Study(FORMAT, "", "", {}, {}, None, (wrong.config,), (wrong,))
    (home / "study.json").write_text(study.to_json())
    code, out, error = call("report", home)
    assert (code, out, error.count("\n")) == (2, "", 1) and said in error
    assert not (home / "report.html").exists()


HIDDEN = "rope\x1b[31m\u202e"
STUDY = Study(FORMAT, "", "", {}, {}, None, (TRIAL,), (SCORED,))


@pytest.mark.parametrize(
    "study",
    [
        replace(STUDY, labels={"nope": "nope\nUse evil"}),
        replace(STUDY, trials=(replace(TRIAL, encoding="a\u2028b"),), results=()),
    ],
)
def test_a_name_with_a_line_break_is_refused(home, study, call):
    (home / "study.json").write_text(study.to_json())
    code, out, error = call("report", home)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "the name of an encoding has a line break" in error


def test_names_of_a_stranger_s_study_are_escapes_in_json_too(home, call):
    (home / "study.json").write_text(replace(STUDY, labels={"nope": HIDDEN}).to_json())
    code, out, error = call("report", home, "--json")
    assert code == 0 and "\u202e" not in out + error
    (place,) = json.loads(out)["places"]
    assert [each["encoding"] for each in place["encodings"]] == [HIDDEN]


def test_a_name_with_a_bar_is_no_plural(home, call):
    odd = "name|names of {0.__class__}"
    study = replace(STUDY, hardware={odd: odd}, versions={odd: odd})
    (home / "study.json").write_text(study.to_json())
    assert call("report", home)[0] == 0
    assert odd in (home / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("place", ["folder", "lock"])
def test_the_run_of_another_user_is_reported_elsewhere(home, monkeypatch, call, place):
    if getattr(os, "geteuid", lambda: 1)():
        pytest.skip("only root can become another user")
    (home / "study.json").write_text(STUDY.to_json())
    if place == "lock":
        (home / ".lock").touch()
        home.chmod(0o777)
    monkeypatch.chdir(home)
    assert call("report", home, "--out", home / "warm")[0] == 0  # imports what that takes
    os.seteuid(65534)
    try:
        code, out, error = call("report", ".")
    finally:
        os.seteuid(0)
    assert (code, out) == (2, "")
    assert error == "posenc: . is not yours to write. Give --out FOLDER.\n"


def test_a_result_without_scores_is_damaged(home):
    (home / "result.json").write_text(TrialResult(TRIAL).to_json())
    with pytest.raises(CorruptResult, match="expected scores at 8"):
        load_result(home.parent, TRIAL)


@pytest.mark.parametrize("field", ["encoding", "task", "objective"])
def test_the_folder_of_a_trial_is_inside_of_its_run(field):
    folder = replace(TRIAL, **{field: "../../x/."}).folder
    assert "/" not in folder and not folder.startswith(".")


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
PLACES = {
    "beyond": {"data_offsets": [0, 1 << 40]},
    "negative": {"data_offsets": [-8, 8]},
    "backward": {"data_offsets": [8, 0]},
    "words": {"data_offsets": ["0", "8"]},
    "fractions": {"data_offsets": [0.0, 8.0]},
    "one": {"data_offsets": [0]},
    "no list": {"data_offsets": 8},
    "a shape in words": {"shape": ["2"]},
    "a negative shape": {"shape": [-2]},
    "a shape that is a number": {"shape": 2},
    "no dtype": {"dtype": None},
    "booleans": {"data_offsets": [False, True]},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_ends_inside_of_its_file(home, place):
    written = json.dumps({"a": TENSOR | PLACES[place]}).encode()
    path = home / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(written)) + written + bytes(8))
    with pytest.raises(ValueError, match="'a' has no place, or one that ends outside"):
        read_safetensors_header(path)


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 26, 1 << 63])
def test_a_header_is_not_longer_than_its_file(home, size):
    path = home / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size) + b"{}")
    with pytest.raises(ValueError, match=f"a header of {size} bytes"):
        read_safetensors_header(path)


def test_a_sound_header_is_read(home):
    written = json.dumps({"a": TENSOR, "__metadata__": {"format": "pt"}}).encode()
    path = home / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(written)) + written + bytes(8))
    assert read_safetensors_header(path) == ({"a": TENSOR}, 8 + len(written))


BIG = b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + struct.pack(">Q", 1) + b"x"
GGUFS = {
    "the other byte order": BIG + struct.pack(">IIQ", ARRAY, U32, 1 << 60) + bytes(64),
    "a long key": header({}, pairs=1)[:24] + struct.pack("<Q", 1 << 40) + bytes(64),
    "a tensor's name": header(SOUND, tensors=1, tail=struct.pack("<Q", 1 << 40) + bytes(64)),
    "a tensor's dimensions": header(
        SOUND, tensors=1, tail=text("a") + struct.pack("<I", 0xFFFFFFFF) + bytes(64)
    ),
}
FIELDS = {
    "heads in words": {"attention.head_count": (STRING, text("4"))},
    "no heads": {"attention.head_count": (U32, 0)},
    "more heads than channels": {"attention.head_count": (U32, 65)},
    "an empty list of heads": {"attention.head_count": (ARRAY, struct.pack("<IQ", U32, 0))},
    "a key length in words": {"attention.key_length": (STRING, text("16"))},
}


@pytest.mark.parametrize("name", GGUFS)
def test_counts_of_gguf_are_bounded(home, name):
    path = home / "m.gguf"
    path.write_bytes(GGUFS[name])
    began = time.perf_counter()
    with pytest.raises(ValueError, match="announced, with"):
        read_metadata(path)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("name", FIELDS)
def test_sizes_of_heads_are_checked(home, name):
    path = home / "m.gguf"
    path.write_bytes(header({**SOUND, **FIELDS[name]}))
    with pytest.raises(ValueError, match="key_length"):
        read_metadata(path)


def test_a_sparse_file_holds_no_more_values_than_a_tokenizer(home):
    path = home / "m.gguf"
    path.write_bytes(header({**SOUND, "x": (ARRAY, struct.pack("<IQ", STRING, 1 << 30))}))
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match="more than 16777216 texts announced"):
        read_metadata(path)
