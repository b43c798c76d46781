"""Finished trials of other runs are reused, and only those that would give the same numbers."""

import dataclasses
import hashlib
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from posenc.compare import reuse
from posenc.compare.engines import run_trials
from posenc.compare.options import Options
from posenc.compare.page.report import report_of
from posenc.compare.results import LengthScore, Study, Timing, TrialResult
from posenc.compare.run_study import run_study
from posenc.compare.trial.config import TrialConfig
from posenc.encodings import hash_of_posenc_code
from posenc.encodings.registry import code_hashes
from posenc.report.html_page import page_of
from posenc.report.report import as_json
from tests.texts import prose

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = {
    "train_length": 16,
    "test_lengths": "32",
    "steps": 2,
    "tune_steps": 1,
    "batch": 2,
    "width": 16,
    "layers": 1,
    "heads": 1,
    "workers": 1,
    "seeds": 1,
    "device": "cpu",
    "precision": "float32",
}


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_bytes(prose(7200))
    return [str(path)]


@pytest.fixture
def trained(monkeypatch):
    """Names of the trials that would be trained; each gets a made-up result."""
    found = []

    def run(folder, trials, engine, watcher):
        for trial in trials:
            if not reuse.is_done(folder, trial):
                found.append(trial.name)
                made = TrialResult(
                    trial,
                    parameters=1000,
                    by_length=tuple(LengthScore(n, 2.5 + n / 1000) for n in trial.test_lengths),
                    timing=Timing(1.0, 1.0, 1.0, "Little CPU"),
                )
                home = folder / trial.folder
                home.mkdir(exist_ok=True)
                reuse.save_result(home, made)

    monkeypatch.setattr(run_trials, "run_trials", run)
    monkeypatch.setattr(
        "posenc.compare.run_study.write_report_files", lambda *_: None
    )  # it takes a second
    return found


def run(trained, encodings, text, **options):
    trained.clear()
    return run_study(Options(encodings, text=text, **SMALL | options))


def test_one_more_encoding_or_seed_trains_only_itself(text, capsys):
    trials = Path("runs").glob("*/*-seed*/log.txt")  # a reused trial has no log
    first = run_study(Options(["rope"], text=text, **SMALL))
    assert len(list(trials)) == 1 and not first.reused
    both = run_study(Options(["rope", "alibi"], text=text, **SMALL))
    assert len(list(Path("runs").glob("*/rope-seed0*/log.txt"))) == 1
    assert both.results[0].by_length == first.results[0].by_length
    assert "1 of 2 trials are reused from other runs" in capsys.readouterr().err
    (where,) = both.reused
    folder, processor = where.removesuffix(")").split(" (")
    assert Path(folder).is_dir() and folder.startswith("runs/compare-")
    assert processor == first.hardware["processor"]


def test_one_more_length_only_tests(text, capsys):
    def result(out, lengths):
        options = SMALL | {"test_lengths": lengths}
        return run_study(Options(["rope"], text=text, out=Path(out), **options)).results[0]

    fresh, other = result("fresh", "32"), result("runs/other", "40")
    more = result("more", "32")
    assert "1 trial has weights: tested only" in capsys.readouterr().err
    assert more.timing.reused_from == "runs/other, tested again here"
    assert more.timing.train_seconds == other.timing.train_seconds
    assert replace(more, timing=None) == replace(fresh, timing=None)  # to the last bit
    (weights,) = Path("runs/other").glob("rope-seed0-*/model.safetensors")
    save_file({name: 30 * each for name, each in load_file(weights).items()}, weights)
    sound = weights.read_bytes()
    asked = [replace(other.config, test_lengths=(32,))]
    Path("copied").mkdir()
    Path("new").mkdir()
    assert reuse.reuse_trials(Path("copied"), asked, [Path("runs/other")])[1] == asked
    for spoil in (
        lambda: os.truncate(weights, 8 * other.parameters + reuse.EXTRA_BYTES + 1),
        lambda: link_to(weights),
    ):
        spoil()
        assert reuse.reuse_trials(Path("new"), asked, [Path("runs/other")]) == (0, [])
        assert not list(Path("new").glob("*"))
    weights.unlink()
    weights.write_bytes(sound)
    again = result("again", "32")
    assert not again.timing.reused_from and "the checkpoint is corrupt" in capsys.readouterr().err
    assert replace(again, timing=None) == replace(fresh, timing=None)


def test_weights_are_copied_piece_by_piece_whatever_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(reuse, "PIECE_BYTES", 1 << 16)
    content = os.urandom((1 << 22) + 5)
    source, target = tmp_path / "weights", tmp_path / "copy"
    source.write_bytes(content)
    tracemalloc.start()
    digest = reuse._copy_and_hash(source, target)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert target.read_bytes() == content
    assert digest == hashlib.sha256(content).hexdigest()
    assert most_bytes < 1 << 20


def test_weights_of_the_same_folder_are_tested_again(text):
    """A search trains the trial that it chooses, with fewer tests."""
    options = SMALL | {"test_lengths": "16", "tune_steps": 0}
    searched = run_study(Options(["rope"], text=text, out=Path("out"), **options)).results[0]
    chosen = replace(searched.config, test_lengths=(16, 32), tune_steps=1)
    others = [replace(chosen, lr=0.1), replace(chosen, seed=1), replace(chosen, steps=3)]
    asked = [*others, chosen]
    assert reuse.reuse_trials(Path("out"), asked, []) == (0, [chosen])
    cursor = Path("out", chosen.folder, "checkpoint.json").read_text(encoding="utf-8")
    assert json.loads(cursor)["reused_from"] == "the same folder, tested again here"


CONSTANT_RATE = {"schedule": "constant", "warmup": 3, "checkpoint_steps": 5}


@pytest.mark.parametrize(
    "lengths", [None, pytest.param("4,8,16", marks=pytest.mark.slow)], ids=["one", "several"]
)
def test_more_steps_at_a_constant_rate_go_on_to_the_bits_of_a_longer_run(text, capsys, lengths):
    def result(out, steps):
        options = SMALL | CONSTANT_RATE | {"steps": steps, "out": Path(out)}
        options["train_lengths"] = lengths
        return run_study(Options(["t5"], text=text, **options)).results[0]

    whole = result("whole", 40)
    result("grown", 20)
    assert "goes on" not in capsys.readouterr().err
    grown = result("grown", 40)
    said = capsys.readouterr().err
    assert "1 trial goes on from one of fewer steps." in said and "corrupt" not in said
    # The curve begins as that of the shorter trial, which shows that this one went on from it.
    steps_of_curve = [*range(2, 21, 2), *range(24, 41, 4)]
    assert [point.step for point in grown.training] == steps_of_curve
    assert grown.training[-1].valid == whole.training[-1].valid
    without_curve = {"training": (), "timing": None}
    assert replace(grown, **without_curve) == replace(whole, **without_curve)
    weights = [Path(out, whole.config.folder, "model.safetensors") for out in ("whole", "grown")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_only_a_whole_last_checkpoint_of_the_same_rates_is_gone_on_from(text, tmp_path):
    options = SMALL | CONSTANT_RATE | {"steps": 6, "out": Path("out")}
    short = run_study(Options(["rope"], text=text, **options)).results[0].config
    home = Path("out", short.folder)
    new, runs = tmp_path / "new", [Path("out")]
    new.mkdir()
    more = replace(short, steps=12)
    assert reuse._is_beginning(short, more)
    other_rates = [{"schedule": schedule} for schedule in ("cosine", "linear", "wsd")]
    for changes in (*other_rates, {"warmup": 0.25}):
        half = replace(short, steps=60, **changes)
        assert not reuse._is_beginning(half, replace(half, steps=120))
    for other in (
        replace(more, schedule="wsd"),
        replace(more, lr=0.1),
        replace(more, seed=1),
        replace(short, steps=5),
        short,
    ):
        assert reuse.continue_trials(new, [other], runs) == 0
    (tensors,) = home.glob("checkpoint-6.safetensors")
    sound = tensors.read_bytes()
    tensors.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert reuse.continue_trials(new, [more], runs) == 0
    assert not list(new.rglob("*.safetensors"))
    tensors.write_bytes(sound)
    assert reuse.continue_trials(new, [more], runs) == 1
    assert (new / more.folder / tensors.name).read_bytes() == sound


def test_more_steps_after_a_rate_that_fell_begin_again_and_say_so(text, trained, capsys):
    run(trained, ["rope", "alibi"], text, out=Path("out"), steps=40)
    run(trained, ["rope", "nope"], text, out=Path("out"), steps=80)
    assert trained == ["rope-seed0", "nope-seed0"]
    said = capsys.readouterr().err
    assert "Note: 1 of 2 trials are there with fewer steps, but their learning rate was" in said
    assert "goes on" not in said


def test_what_was_reused_is_marked(text, trained):
    run(trained, ["rope"], text, out=Path("runs/one"))
    run(trained, ["rope", "alibi"], text, out=Path("runs/two"))
    assert trained == ["alibi-seed0"]
    study = run(trained, ["rope", "alibi", "nope"], text, out=Path("runs/three"))
    assert trained == ["nope-seed0"]
    # A chain of runs names the run that trained.
    assert study.reused == {"runs/one (Little CPU)": 1, "runs/two (Little CPU)": 1}
    assert "1 trial reused from runs/one (Little CPU)." in page_of(report_of(study)).html()
    kept = Study.from_json(Path("runs/three/study.json").read_text(encoding="utf-8"))
    reused = json.loads(as_json(report_of(kept)))["trials"]["reused"]
    assert next(iter(reused.values())) == {"from": "runs/one", "processor": "Little CPU"}
    run(trained, ["rope"], text, seeds=2)
    assert trained == ["rope-seed1"]


def test_runs_elsewhere_are_searched_if_named(text, trained):
    run(trained, ["rope"], text, out=Path("elsewhere/one"))
    run(trained, ["rope"], text, out=Path("two"))
    assert trained == ["rope-seed0"]
    for place in ("elsewhere", "elsewhere/one"):
        out = Path(f"out-{place.replace('/', '-')}")
        study = run(trained, ["rope"], text, out=out, reuse=[place])
        assert not trained and study.reused == {"elsewhere/one (Little CPU)": 1}
    with pytest.raises(ValueError, match=r"--reuse must be a folder .*, and nowhere is none\."):
        run(trained, ["rope"], text, out=Path("three"), reuse=["nowhere"])
    assert not Path("three").exists()


def damage(home):
    path = home / "result.json"
    path.write_text(path.read_text(encoding="utf-8").replace("2.5", "2.4", 1), encoding="utf-8")


def change(home, **fields):
    """Write a sealed result with other fields."""
    path = home / "result.json"
    known = TrialResult.from_json(path.read_text(encoding="utf-8"))
    path.write_text(dataclasses.replace(known, **fields).to_json(), encoding="utf-8")


def link_to(path):
    path.unlink()
    Path("elsewhere").write_bytes(b"the user's")
    path.symlink_to(Path("elsewhere").resolve())


def link_file(home):
    target = home.parent.parent / "target.json"
    (home / "result.json").rename(target)
    (home / "result.json").symlink_to(target)


def link_folder(home):
    target = home.parent.parent / "target"
    home.rename(target)
    home.symlink_to(target)


def link_run(home):
    link_folder(home.parent)


def pipe(home):
    (home / "timing.json").unlink()
    os.mkfifo(home / "timing.json")


def grow(home):
    with (home / "result.json").open("a", encoding="utf-8") as file:
        file.write(" " * reuse.MAX_RESULT_BYTES)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "spoil",
    [
        damage,
        link_file,
        link_folder,
        link_run,
        pipe,
        grow,
        lambda home: change(home, reason="loss became nan"),
        lambda home: change(home, by_length=()),
        lambda home: change(home, config=dataclasses.replace(TRIAL(home), steps=3)),
        lambda home: (home / "timing.json").unlink(),
    ],
    ids="damaged linked folder-linked run-linked pipe large failed empty other no-timing".split(),
)
def test_a_stranger_s_folder_is_read_with_bounds(text, trained, spoil):
    run(trained, ["rope"], text, out=Path("theirs/run"))
    (home,) = Path("theirs/run").glob("rope-seed0-*")
    study = run(trained, ["rope"], text, out=Path("sound"), reuse=["theirs"])
    assert not trained and study.reused
    spoil(home)
    study = run(trained, ["rope"], text, out=Path("spoiled"), reuse=["theirs"])
    assert trained == ["rope-seed0"] and not study.reused


def TRIAL(home) -> TrialConfig:
    return TrialResult.from_json((home / "result.json").read_text(encoding="utf-8")).config


@pytest.mark.parametrize("what", ["text", "source", "registry", "steps"])
def test_another_text_source_or_setting_is_trained(text, trained, monkeypatch, what):
    run(trained, ["rope"], text)
    run(trained, ["rope"], text, out=Path("same"))
    assert not trained
    given = {"steps": 3} if what == "steps" else {}
    read, entry = code_hashes._read_or_empty, code_hashes.entry
    if what == "text":
        Path(text[0]).write_bytes(prose(7200).replace(b"mat", b"hat"))
    elif what == "source":  # in a file that rope.py imports
        changed = b"\n# mended"
        monkeypatch.setattr(
            code_hashes, "_read_or_empty", lambda f: read(f) + changed * (f.name == "series.py")
        )
    elif what == "registry":
        monkeypatch.setattr(
            code_hashes, "entry", lambda name: entry(name)._replace(defaults={"interleaved": True})
        )
    study = run(trained, ["rope"], text, out=Path("other"), **given)
    assert trained == ["rope-seed0"] and not study.reused


def test_every_field_of_a_trial_decides(text, trained):
    (trial,) = run(trained, ["rope"], text, out=Path("one")).trials
    Path("two").mkdir()
    for field in dataclasses.fields(trial):
        value = getattr(trial, field.name)
        known = {int: 99, float: 9.0, tuple: (16, 64)}
        other = next((new for kind, new in known.items() if isinstance(value, kind)), "x")
        changed = dataclasses.replace(trial, **{field.name: other})
        assert changed.folder != trial.folder
        Path("one", trial.folder).rename(Path("one", changed.folder))  # the name lies
        assert reuse.reuse_trials(Path("two"), [changed], [Path("one")]) == (0, []), field.name
        Path("one", changed.folder).rename(Path("one", trial.folder))
    assert reuse.reuse_trials(Path("two"), [trial], [Path("one")]) == (1, [])


def test_the_source_of_an_encoding_is_what_its_module_imports(tmp_path, monkeypatch):
    assert len({hash_of_posenc_code(name) for name in ("rope", "alibi", "t5", "nope", "yarn")}) == 5
    assert hash_of_posenc_code("rope+alibi") not in {
        hash_of_posenc_code("rope"),
        hash_of_posenc_code("alibi"),
    }
    assert hash_of_posenc_code("rope:rope_theta=5") == hash_of_posenc_code("rope")
    # A class outside posenc may use any of posenc's, so a change of one counts.
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("import posenc\n\nclass Own(posenc.ALiBi):\n    pass\n", "utf-8")
    read, before = (
        code_hashes._read_or_empty,
        {n: hash_of_posenc_code(n) for n in ("own.py:Own", "alibi", "rope")},
    )
    monkeypatch.setattr(
        code_hashes, "_read_or_empty", lambda f: read(f) + b"#" * (f.name == "alibi.py")
    )
    after = {name: hash_of_posenc_code(name) for name in before}
    assert [name for name in before if after[name] != before[name]] == ["own.py:Own", "alibi"]
    monkeypatch.setattr(
        code_hashes, "_read_or_empty", lambda f: read(f) + b"#" * (f.name == "yarn.py")
    )
    after = {name: hash_of_posenc_code(name) for name in before}
    assert [name for name in before if after[name] != before[name]] == ["own.py:Own", "rope"]


def other_disk(*_, **__):
    raise OSError(18, "Invalid cross-device link")


def test_a_text_is_stored_once(text, trained, monkeypatch):
    def files(run):
        return sorted(Path("runs", run).glob("corpus-*/*.u16"))

    def same(run):
        pairs = zip(files("one"), files(run), strict=True)
        return [a.stat().st_ino == b.stat().st_ino for a, b in pairs]

    run(trained, ["rope"], text, out=Path("runs/one"))
    run(trained, ["rope"], text, out=Path("runs/two"))
    assert same("two") == [True] * 3
    with monkeypatch.context() as patch:  # another disk
        patch.setattr(
            "os.link", lambda *_, **__: (_ for _ in ()).throw(OSError(18, "cross-device"))
        )
        run(trained, ["rope"], text, out=Path("runs/three"))
    assert same("three") == [False] * 3
    whole = [file.read_bytes() for file in files("one")]
    # A damaged text and one behind a link are neither linked nor copied.
    for left in ("two", "three"):
        for file in files(left):
            file.unlink()
            file.write_bytes(b"damaged")
    (corpus,) = Path("runs/one").glob("corpus-*")
    corpus.rename(Path("moved"))
    corpus.symlink_to(Path("moved").resolve())
    run(trained, ["rope"], text, out=Path("runs/four"))
    assert [file.read_bytes() for file in files("four")] == whole
    assert all(file.stat().st_nlink == 1 for file in files("four"))


def test_a_text_of_a_stranger_is_not_linked(text, trained):
    run(trained, ["rope"], text, out=Path("theirs/run"))
    run(trained, ["rope"], text, out=Path("mine"), reuse=["theirs"])
    assert all(file.stat().st_nlink == 1 for file in Path("mine").glob("corpus-*/*.u16"))


def test_merged_runs_count_a_reused_trial_once(tmp_path, text, trained):
    from posenc.compare.reports import report_runs

    run(trained, ["rope"], text, out=Path("runs/one"))
    run(trained, ["rope", "alibi"], text, out=Path("runs/two"))
    merged = report_runs.report_runs([Path("runs/one"), Path("runs/two")], Path("page"))
    assert len(merged.results) == 2
