"""Ablations: every arm can be planned, shared projections are what they say, and a table comes."""

import csv
import dataclasses

import pytest
import scipy.stats

from posenc.compare.options import Options
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.plan import plan_trials
from posenc.compare.trial import train
from tests.compare.test_tasks import TEXT
from tests.experiment import FOLDER, experiment

pytestmark = pytest.mark.slow  # a script of this repository, not of posenc

ablations = experiment("ablations")
QUESTIONS = ablations.read_questions(FOLDER / "ablations.toml")
SMALL = {"width": 16, "layers": 1, "heads": 1, "batch": 2}


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_arm_builds_a_model_of_its_own(name):
    seen = set()
    for _, options in ablations.arms(QUESTIONS[name]):
        encodings = read_encodings(QUESTIONS[name]["encodings"])
        (trial,) = plan_trials(Options(width=16, layers=3, heads=2, **options), encodings)
        for each in encodings:
            made = dataclasses.replace(trial, encoding=each.text)
            train.build_model(made)
            seen.add(
                (made.hash, options.get("check_lr"))
            )  # which makes others once they are checked
    assert len(seen) == len(ablations.arms(QUESTIONS[name])) * len(QUESTIONS[name]["encodings"])


def test_a_list_of_values_makes_an_arm_of_each():
    made = ablations.arms(
        {"question": "?", "encodings": [], "lr": 1.0, "heads": [1, 2], "width": [8, 16]}
    )
    assert [arm for arm, _ in made] == [
        "heads 1 width 8", "heads 1 width 16", "heads 2 width 8", "heads 2 width 16",
    ]  # fmt: skip
    assert made[2][1] == {"lr": 1.0, "heads": 2, "width": 8}


def test_shared_projections_are_shared_and_another_trial():
    sizes = {}
    for kind in ("separate", "k=v", "q=k", "none"):
        config = dataclasses.replace(TEXT, projections=kind)
        sizes[kind] = sum(p.numel() for p in train.build_model(config).parameters())
        assert (config.hash == TEXT.hash) == (kind == "separate")
    square = TEXT.width**2 * TEXT.layers
    assert sizes["separate"] - sizes["k=v"] == sizes["separate"] - sizes["q=k"] == square
    assert sizes["separate"] - sizes["none"] == 3 * square


@pytest.mark.parametrize(
    "options, words",
    [
        ({"projections": "kv"}, "--projections must be separate, k=v, q=k or none, got 'kv'"),
        ({"projections": "q=k", "kv_heads": 1}, "--projections q=k needs as many key/value heads"),
    ],
)
def test_projections_that_cannot_be_shared_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        plan_trials(Options(**options), read_encodings(["rope"]))


@pytest.mark.parametrize(
    "name, changed, arms",
    [
        (
            "projections_masked", {"projections": ["k=v", "none"]},
            ["projections k=v", "projections none"],
        ),
        (
            "bidirectional", {},
            ["objective causal", "objective masked", "objective masked, under a causal mask"],
        ),
    ],
)  # fmt: skip
def test_a_question_ends_in_its_table(name, changed, arms, tmp_path, monkeypatch, run, text):
    asked = [name, "--seeds", 1, "--steps", 1, "--workers", 1]
    asked += ["--text", text, "--out", tmp_path / "runs", "--tables", tmp_path]
    monkeypatch.setattr(ablations, "SUITE_SIZES", SMALL)
    question = {**QUESTIONS[name], "encodings": ["t5"], "test_lengths": "128,256", **changed}
    monkeypatch.setattr(ablations, "read_questions", lambda path: {name: question})
    assert question["question"] in run(ablations, *asked)[1]
    with (tmp_path / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["arm"], r["length"]) for r in rows] == [(a, n) for a in arms for n in ("128", "256")]
    assert all(0 < float(row["bits_per_byte"]) < 20 for row in rows)


def test_two_questions_share_their_trials_and_rates_have_a_table(tmp_path, monkeypatch, run, text):
    asked = ["--seeds", 1, "--steps", 1, "--workers", 1, "--text", text]
    asked += ["--out", tmp_path / "runs", "--tables", tmp_path]
    monkeypatch.setattr(ablations, "SUITE_SIZES", SMALL)
    same = {"question": "?", "encodings": ["t5"], "test_lengths": "128,256"}
    questions = {"first": same, "second": {**same, "check_lr": [False, True]}}
    monkeypatch.setattr(ablations, "read_questions", lambda path: questions)
    assert run(ablations, *asked)[0] == 0
    first, second, tried = [
        list(csv.DictReader((tmp_path / f"{name}.csv").read_text(encoding="utf-8").splitlines()))
        for name in ("first", "second", "second_tried")
    ]
    assert [row["bits_per_byte"] for row in second[:2]] == [row["bits_per_byte"] for row in first]
    assert [row["arm"] for row in second[::2]] == ["check_lr False", "check_lr True"]
    taken = tried[0]["taken"].split(",")[0]
    trials = [path.name for path in (tmp_path / "runs").glob("t5*") if path.is_dir()]
    assert len(trials) == 1 + 3 + (taken != "0.002"), trials
    assert {row["lr"] for row in second[2:]} == {taken} and taken in ("0.001", "0.002", "0.004")


def scored(encoding, arm, bits):
    return [ablations.Scored(encoding, arm, s, 128, x, ()) for s, x in enumerate(bits)]


def differences(rows):
    found = [dict(zip(ROW, row, strict=True)) for row in ablations.with_differences(rows)]
    return {(r["encoding"], r["arm"]): (r["minus"], r["difference"], r["half_95"]) for r in found}


ROW = ("encoding", "arm", "seed", "length", "bits_per_byte", "minus", "difference", "half_95")


def test_a_difference_is_from_the_first_arm_of_the_encoding_or_the_first_encoding():
    gaps = (0.5, 0.7, 0.6)
    rope, t5 = [2.0, 2.5, 2.2], [3.0, 3.1, 3.6]
    other = [a + gap for a, gap in zip(t5, gaps, strict=True)]
    half = scipy.stats.ttest_1samp(gaps, 0).confidence_interval(0.95).high - 0.6
    arms = [*scored("rope", "a", rope), *scored("t5", "a", t5), *scored("t5", "b", other)]
    assert differences(arms)["t5", "b"] == ("t5 a", "+0.6000", f"{half:.4f}")
    assert differences(arms)["rope", "a"] == ("rope a", "+0.0000", "")
    one = [*scored("rope", "", rope), *scored("t5", "", [None, 3.0, None])]
    assert differences(one)["t5", ""] == ("rope", "+0.5000", "")  # one seed has no interval
    none = [*scored("rope", "", rope), *scored("t5", "", [None] * 3)]
    assert differences(none)["t5", ""] == ("rope", "", "")


@pytest.mark.parametrize(
    "given, words",
    [
        (["--seeds", "0"], "--seeds must be a whole number of at least 1, got 0."),
        (["--steps", "0"], "--steps must be a whole number of at least 1, got 0."),
        (["--steps", "-1"], "--steps must be a whole number of at least 1, got -1."),
        (["--workers", "0"], "--workers must be a whole number of at least 1, got 0."),
        (["--text", "nothere.txt"], "No such file: nothere.txt."),
        (["--text", "file"], "The text is too short: it has 5 bytes"),
        (["--out", "file"], "file is not a folder."),
        (["--out", "others"], "was not written by posenc compare (it contains letter.txt)"),
        (["--tables", "file"], "file is not a folder."),
        (["--tables", "tables"], "positions.csv is not a file."),
        (["--tables", "rates"], "positions_tried.csv is not a file."),
    ],
)
def test_what_is_wrong_is_refused_before_a_trial(given, words, tmp_path, monkeypatch, run):
    (tmp_path / "file").write_text("a b c", encoding="utf-8")
    (tmp_path / "others").mkdir(parents=True)
    (tmp_path / "others/letter.txt").touch()
    (tmp_path / "tables/positions.csv").mkdir(parents=True)
    (tmp_path / "rates/positions_tried.csv").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ablations, "run_study", lambda *a, **k: pytest.fail("it was run"))
    code, _, err = run(ablations, "positions", "--out", "new", "--tables", "new", *given)
    said = err.splitlines()[-1]
    assert code == 2 and words in said and said.startswith("ablations.py: error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_question_is_refused(run):
    assert "unknown question 'rope_bass'" in run(ablations, "rope_bass")[2]


def test_an_arm_that_cannot_be_run_is_refused_before_the_first_one(
    monkeypatch, tmp_path, run, text
):
    question = {"question": "?", "encodings": ["rope"], "train_length": [16, 1 << 16]}
    monkeypatch.setattr(ablations, "read_questions", lambda path: {"lengths": question})
    monkeypatch.setattr(ablations, "run_study", lambda *a, **k: pytest.fail("it was run"))
    code, _, err = run(ablations, "--text", text, "--out", tmp_path / "runs")
    assert code == 2 and "training at 65536 bytes" in err
