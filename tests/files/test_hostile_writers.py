"""Every writer meets links, hard links, pipes, foreign folders, a full disk and one that is gone:
what was never named stays as it is, nothing half-written stays, and no folder is made anew."""

import contextlib
import errno
import os
import socket
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from posenc.compare.plan.splits import MinimumSizes, split_text
from posenc.compare.plan.time_estimate import measure_kinds
from posenc.compare.progress import EventFile
from posenc.compare.results import Timing, TrialResult
from posenc.compare.trial import process
from posenc.compare.trial.checkpoint import (
    CorruptCheckpoint,
    restore_checkpoint,
    write_checkpoint,
)
from posenc.compare.trial.config import TrialConfig, write_trial
from posenc.compare.trial.result_files import Cursor, is_done, save_result
from posenc.files.atomic import atomically, prepare_file, write_atomically
from posenc.files.find_texts import find_text
from posenc.files.folders import LOCK_NAME, locked, new_folder
from posenc.files.opening import make_private_folder, open_to_change
from posenc.hf.restart_state import write_sealed
from posenc.hf.tuning import save_tuning
from posenc.report.chart import Chart
from posenc.report.figure_files import write_page
from posenc.report.html_page import Page, Plot
from posenc.runtimes.writers.copies import copy_files, write_config
from posenc.runtimes.writers.weight_rows import rewrite_tensors
from tests.experiment import experiment

TRIAL = TrialConfig(
    encoding="nope",
    seed=0,
    corpus="0" * 16,
    train_length=8,
    test_lengths=(8,),
    steps=2,
    batch=1,
    width=8,
    layers=1,
    heads=1,
    kv_heads=1,
    lr=0.1,
    device="cpu",
    precision="float32",
    torch="2.13.0",
    recipe=1,
)
FAILED = TrialResult(TRIAL, reason="planted", timing=Timing(1.0, 1.0, 1.0))


@pytest.fixture
def victim(tmp_path):
    """A folder that is named to nobody; afterwards it is as it was."""
    folder = tmp_path / "victim"
    folder.mkdir()
    names = ("file", "config.json", "result.json", "log.txt", "checkpoint.json", "tune.json")
    for name in names:
        (folder / name).write_text("precious")
    (folder / "run-0").mkdir()
    yield folder
    assert {p.name for p in folder.iterdir()} == {*names, "run-0"}
    assert {(folder / name).read_text() for name in names} == {"precious"}


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def through_atomically(path):
    with atomically(path) as partial:
        partial.write_bytes(b"new")


def figure(path):
    drawn, axes = plt.subplots(figsize=(1, 1))
    axes.plot([0, 1], label="line")
    chart = Chart({"x": [0, 1], "y": [0, 1]}, lambda _: drawn)
    page = Page("figure")
    page.append_section("", Plot(chart, "caption", "description", name=path.stem))
    try:
        write_page(page, None, path.parent)
    finally:
        plt.close(drawn)


def checkpoint(path):
    model = torch.nn.Linear(1, 1)
    write_checkpoint(
        path.parent, Cursor(TRIAL.hash, 1), model, torch.optim.AdamW(model.parameters())
    )


REPLACED = {
    "bytes": ("a.bin", lambda path: write_atomically(path, b"new")),
    "a file by its name": ("a.gguf", through_atomically),
    "page": ("a.html", lambda path: Page("new").write(path)),
    "figure": ("a.svg", figure),
    "trial": ("config.json", lambda path: write_trial(path.parent, TRIAL)),
    "result": ("result.json", lambda path: save_result(path.parent, FAILED)),
    "state": ("search.json", lambda path: write_sealed(path, {"a": "b"}, {"c": 1})),
    "config": ("config.json", lambda path: write_config(path, {"a": 1})),
    "checkpoint": ("checkpoint.json", checkpoint),
    "rows": ("rows.jsonl", lambda path: experiment("published_trials").add_rows(path, [])),
}
"""Files that are replaced: a name, and what writes it."""


@pytest.mark.parametrize("writer", REPLACED)
@pytest.mark.parametrize("trap", ["link", "link to nothing", "hard link"])
def test_what_a_link_names_stays(home, victim, writer, trap):
    name, write = REPLACED[writer]
    if trap == "hard link":
        (home / name).hardlink_to(victim / "file")
    else:
        (home / name).symlink_to(victim / ("file" if trap == "link" else "missing"))
    if writer == "rows" and trap != "link to nothing":
        with pytest.raises(ValueError, match="line 1"):  # a damaged file is no row
            write(home / name)
        return
    write(home / name)
    assert (home / name).is_file() and not (home / name).is_symlink()


@pytest.mark.parametrize("writer", REPLACED)
def test_a_folder_in_the_way_is_refused_and_nothing_is_left(home, writer):
    name, write = REPLACED[writer]
    (home / name / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write(home / name)
    assert (home / name / "inside").is_dir()
    assert not [p for p in home.iterdir() if p.name.endswith(".partial")]


@pytest.mark.parametrize("writer", REPLACED)
def test_a_full_disk_keeps_the_old_file_and_leaves_nothing(home, writer, monkeypatch):
    name, write = REPLACED[writer]
    if writer != "rows":
        (home / name).write_text("old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(home / name)
    monkeypatch.undo()
    assert {p.name for p in home.iterdir()} <= {name}
    assert writer == "rows" or (home / name).read_text() == "old"


@pytest.mark.parametrize("writer", [name for name in REPLACED if name != "rows"])
def test_a_disk_that_is_gone_is_not_made_anew(home, writer):
    name, write = REPLACED[writer]
    home.rmdir()
    with pytest.raises(FileNotFoundError):
        write(home / name)
    assert not home.exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("write", [through_atomically, lambda p: write_atomically(p, b"new")])
@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_an_error_names_the_file_and_no_hidden_one(home, monkeypatch, call, write, error):
    plain = getattr(os, call)

    def fail(path, *given, **options):
        if call == "open" and not str(path).endswith(".partial"):
            return plain(path, *given, **options)
        raise OSError(error, os.strerror(error), *([] if call == "fsync" else [path]))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError) as failed:
        write(home / "a.bin")
    monkeypatch.undo()
    assert (failed.value.errno, failed.value.filename) == (error, str(home / "a.bin"))


def events(path):
    with EventFile(path) as log:
        log.note(TRIAL, "said")


def trial_log(path):
    """The log of a trial's process, or of a measurement, in the folder of the trial."""
    started = process.TrialProcess(path.parent.parent, TRIAL, 0, "posenc.nothing")
    list(started.events())


GROWING = {"events": ("events.jsonl", events), "a trial's log": ("log.txt", trial_log)}


@pytest.mark.parametrize("writer", GROWING)
@pytest.mark.parametrize("trap", ["link", "link to nothing", "hard link", "pipe", "folder"])
def test_nothing_grows_through_a_link(tmp_path, victim, writer, trap):
    name, write = GROWING[writer]
    home = tmp_path / TRIAL.folder
    home.mkdir()
    if trap == "hard link":
        (home / name).hardlink_to(victim / "file")
    elif trap == "pipe":
        os.mkfifo(home / name)
    elif trap == "folder":
        (home / name).mkdir()
    else:
        (home / name).symlink_to(victim / ("file" if trap == "link" else "missing"))
    with pytest.raises(ValueError, match="a link, or not an ordinary file; remove it"):
        write(home / name)


def text_copy(folder):
    source = folder.parent / "text.txt"
    source.write_text("the quick brown fox. " * 200)
    cut = split_text(find_text([str(source)]), MinimumSizes(8, 8, 1), folder)
    target = folder / f"corpus-{cut.info.hash}"
    return target, lambda: cut.write(folder)


def tuned(folder):
    model = torch.nn.Linear(1, 1)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1)).sum().backward()
    adam.step()
    named = dict(model.named_parameters())
    return folder / "tune", lambda: save_tuning(folder / "tune", {"a": "b"}, named, adam, [1.0])


INNER = {
    "a trial": lambda folder: (
        folder / TRIAL.folder,
        lambda: process.make_trial_folder(folder, TRIAL),
    ),
    "a failure": lambda folder: (
        folder / TRIAL.folder,
        lambda: process.write_failure(folder / TRIAL.folder, FAILED),
    ),
    "a measurement": lambda folder: (
        folder / TRIAL.folder,
        lambda: measure_kinds([TRIAL], folder, 1),
    ),
    "a tuning": tuned,
    "a text": text_copy,
}
"""Folders inside of a folder of results or a state: the path, and what makes and fills it."""


@pytest.mark.parametrize("maker", INNER)
@pytest.mark.parametrize("trap", ["link", "link to nothing", "file", "pipe"])
def test_no_inner_folder_leads_elsewhere(home, victim, maker, trap):
    path, make = INNER[maker](home)
    if trap == "file":
        path.write_text("in the way")
    elif trap == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim if trap == "link" else victim / "missing")
    with pytest.raises((ValueError, OSError), match=r"a link, or not|exists already"):
        make()


@pytest.mark.parametrize("maker", ["a trial", "a failure", "a measurement", "a tuning"])
def test_the_folder_above_is_not_made_anew(home, maker):
    _, make = INNER[maker](home)
    home.rmdir()
    if maker == "a failure":
        make()
    else:
        with pytest.raises(FileNotFoundError):
            make()
    assert not home.exists()


def test_results_behind_a_link_do_not_count(home, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_result(elsewhere, FAILED)
    (home / TRIAL.folder).symlink_to(elsewhere)
    assert not is_done(home, TRIAL)
    (elsewhere / "checkpoint.json").write_text("precious")
    with pytest.raises(ValueError, match="a link"):
        process.make_trial_folder(home, TRIAL)
    assert (elsewhere / "checkpoint.json").exists() and (elsewhere / "result.json").exists()


def test_a_checkpoint_names_no_file_elsewhere(home, victim):
    model = torch.nn.Linear(1, 1)
    adam = torch.optim.AdamW(model.parameters())
    for name in ("../victim/file", str(victim / "file"), "", ".."):
        state = Cursor(TRIAL.hash, 1, tensors=name, tensors_sha256="0")
        write_atomically(home / "checkpoint.json", state.to_json())
        with pytest.raises(Exception, match=r"is not a file of|not an ordinary"):
            restore_checkpoint(home, TRIAL.hash, model, adam)


def test_a_checkpoint_is_no_larger_than_its_model_needs(home):
    model = torch.nn.Linear(1, 1)
    adam = torch.optim.AdamW(model.parameters())
    write_checkpoint(home, Cursor(TRIAL.hash, 1), model, adam)
    assert restore_checkpoint(home, TRIAL.hash, model, adam)
    os.truncate(home / "checkpoint-1.safetensors", 1 << 25)
    with pytest.raises(CorruptCheckpoint, match="33554432 bytes, expected at most"):
        restore_checkpoint(home, TRIAL.hash, model, adam)


def test_weights_are_changed_in_no_linked_file(home, victim, tmp_path):
    outside = tmp_path / "outside.safetensors"
    save_file({"a": torch.ones(2)}, outside)
    (home / "model.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match="a link"):
        rewrite_tensors(home / "model.safetensors", ["a"], lambda name, value: 2 * value)
    with safe_open(outside, "pt") as opened:
        assert opened.get_tensor("a").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("trap", ["link", "file"])
def test_a_copy_replaces_nothing(home, victim, tmp_path, trap):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    target = home / "tokenizer.json"
    if trap == "link":
        target.symlink_to(victim / "file")
    else:
        target.write_text("{}")
    with pytest.raises(FileExistsError):
        copy_files(source, home)


def test_a_place_that_is_no_ordinary_file_is_refused_before_the_work(home):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(home / "socket"))
        for path in (home / "socket", Path("/dev/null")):
            with pytest.raises(OSError, match="not an ordinary file"):
                prepare_file(path)


@pytest.mark.parametrize("special", ["pipe", "socket", "folder"])
def test_what_is_no_ordinary_file_is_never_replaced(home, special):
    path = home / special
    with socket.socket(socket.AF_UNIX) as bound:
        {"pipe": os.mkfifo, "folder": os.mkdir, "socket": lambda p: bound.bind(str(p))}[special](
            path
        )
        mode = path.lstat().st_mode
        with pytest.raises(OSError):
            write_atomically(path, "page")
        assert path.lstat().st_mode == mode and list(home.iterdir()) == [path]


def test_a_partial_file_that_is_exchanged_is_not_put_in_place(home, victim):
    (home / "a").write_text("old")
    with pytest.raises(OSError, match="was exchanged"), atomically(home / "a") as partial:
        partial.unlink()
        partial.symlink_to(victim / "file")
    assert (home / "a").read_text() == "old"


@pytest.fixture
def not_ours(home, monkeypatch):
    """A folder of root's in which we are another user; paths in it are relative, because the
    folders above are root's alone."""
    if getattr(os, "geteuid", lambda: 1)():
        pytest.skip("only root can become another user")
    folder = home / TRIAL.folder
    folder.mkdir()
    monkeypatch.chdir(home)
    yield Path()
    os.seteuid(0)


def entered(block):
    with block:
        pass


NOBODY = 65534
WRITERS = {
    **{name: (file, write) for name, (file, write) in REPLACED.items() if name != "rows"},
    **GROWING,
    "a changed file": ("a.safetensors", lambda path: open_to_change(path).close()),
    "a lock": (
        LOCK_NAME,
        lambda path: contextlib.ExitStack().enter_context(locked(path.parent, "")),
    ),
    "a new folder": (
        "out",
        lambda path: contextlib.ExitStack().enter_context(new_folder(path.parent / "new")),
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_of_another_user_stays_as_it_is(not_ours, writer):
    name, write = WRITERS[writer]
    inner = Path(TRIAL.folder)
    warm = Path("warm", TRIAL.folder)
    warm.mkdir(parents=True)
    (warm / name).touch()
    write(warm / name)  # as root, who may import what that takes
    (inner / name).write_text("theirs")
    os.seteuid(NOBODY)
    with pytest.raises((OSError, ValueError), match=r"Permission denied|cannot write there"):
        write(inner / name)
    os.seteuid(0)
    assert [path.name for path in inner.iterdir()] == [name]
    assert (inner / name).read_text() == "theirs"


@pytest.mark.parametrize("maker", INNER)
def test_nothing_is_made_in_a_folder_of_another_user(not_ours, maker):
    if maker == "a text":
        Path("text.txt").touch()
    folder = Path(TRIAL.folder) if maker in ("a tuning", "a text") else not_ours
    path, make = INNER[maker](folder)
    if path.exists():
        path.rmdir()
    before = sorted(folder.rglob("*"))
    os.seteuid(NOBODY)
    if maker == "a failure":
        make()
    else:
        with pytest.raises((OSError, ValueError), match="Permission denied"):
            make()
    os.seteuid(0)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_leftovers_and_caches_of_another_user_are_not_used(not_ours, mode):
    left = Path(".out.0123456789abcdef.unproved")
    for folder in (left, Path("cache")):
        folder.mkdir()
        (folder / "file").write_text("theirs")
        os.chown(folder, NOBODY, NOBODY)
        folder.chmod(mode)
    with new_folder(Path("out")) as temporary:
        (temporary / "a").write_text("a")
    with pytest.raises(OSError, match="belongs to somebody else"):
        make_private_folder(Path("cache"))
    assert (left / "file").read_text() == (Path("cache") / "file").read_text() == "theirs"
