"""Several runs in one report: counted once, told apart, never mixed."""

import dataclasses
import html
import json
from importlib import resources
from pathlib import Path

import pytest

from posenc.compare.judge import published
from posenc.compare.page.show import write_page
from posenc.compare.page.tables import agreement_table
from posenc.compare.reports.merge import merge
from posenc.compare.reports.report_runs import report_runs
from posenc.compare.results import PositionScore, Study, TrialResult
from posenc.compare.trial.config import RECIPE
from posenc.tasks.known import TASKS
from tests.compare.judge.test_summary import OFFSETS, result, study
from tests.compare.test_tasks import result as of_task
from tests.compare.test_tasks import result as task_result
from tests.compare.test_tasks import study_of

A, B = Path("a"), Path("b")


def whole(encoding, seed, at=2.0):
    """A result with all that a page draws."""
    found = result(encoding, seed, [at + 0.01 * OFFSETS[encoding][seed]] * 3, ((64, 3.0), (128, 2)))
    position = (PositionScore(0, 64, 3.0), PositionScore(64, 128, 2.0))
    return dataclasses.replace(found, by_position=position)


def changed(given: Study, **fields) -> Study:
    """The study under another config."""
    return dataclasses.replace(
        given,
        trials=tuple(dataclasses.replace(t, **fields) for t in given.trials),
        results=tuple(
            dataclasses.replace(r, config=dataclasses.replace(r.config, **fields))
            for r in given.results
        ),
    )


def on_disk(folder: Path, given: Study) -> Path:
    """A run as posenc compare leaves it."""
    folder.mkdir()
    bare = dataclasses.replace(given, results=())
    (folder / "study.json").write_text(bare.to_json(), encoding="utf-8")
    for each in given.results:
        home = folder / each.config.folder
        home.mkdir()
        (home / "result.json").write_text(each.to_json(), encoding="utf-8")
        if each.timing:
            (home / "timing.json").write_text(each.timing.to_json(), encoding="utf-8")
    return folder


def test_seeds_of_two_machines_are_paired():
    ours = study(whole("rope", 0), whole("t5", 0, 3.0))
    theirs = study(whole("rope", 1), whole("t5", 1, 3.0), whole("alibi", 1))
    theirs = dataclasses.replace(theirs, hardware={"processor": "other"}, started="earlier")
    ours = dataclasses.replace(ours, hardware={"processor": "one"})
    merged, conflicts = merge([(A, ours), (B, theirs)])
    assert conflicts == [] and len(merged.trials) == len(merged.results) == 5
    assert merged.hardware == {"processor": "one; other"} and merged.started == "earlier"
    assert merged.command == "posenc report a b"


def test_a_trial_of_two_runs_counts_once():
    ours = study(whole("rope", 0), whole("t5", 0))
    slower = dataclasses.replace(whole("rope", 0), timing=None)  # other seconds, same numbers
    merged, conflicts = merge([(A, ours), (B, study(slower, whole("rope", 1)))])
    assert [(r.config.encoding, r.config.seed) for r in merged.results] == [
        ("rope", 0), ("t5", 0), ("rope", 1),
    ]  # fmt: skip
    assert conflicts == []


def test_other_numbers_of_one_trial_are_named():
    merged, (said,) = merge([(A, study(whole("rope", 0))), (B, study(whole("rope", 0, 2.5)))])
    assert said == (
        "rope seed 0 has other numbers in b than in a (at 512 bytes 2.5 and 2); the latter count"
    )
    assert merged.results[0].by_length[0].bits_per_byte == 2.0


def test_other_numbers_of_one_task_say_which_task():
    runs = [(folder, study_of(of_task(exact=(1.0, far)), of_task(task="recall")))
            for folder, far in ((A, 0.5), (B, 0.4))]  # fmt: skip
    merged, (said,) = merge(runs)
    assert said == "rope on copy seed 0 has other numbers in b than in a; the latter count"
    assert merged.results[0].by_case[1].exact_match == 0.5 and len(merged.results) == 2


def test_what_failed_in_one_run_and_finished_in_the_other_has_finished():
    failed = TrialResult(whole("rope", 0).config, reason="nan")
    for runs in ([(A, study(failed)), (B, study(whole("rope", 0)))],
                 [(A, study(whole("rope", 0))), (B, study(failed))]):  # fmt: skip
        merged, conflicts = merge(runs)
        assert not merged.failed and len(merged.finished) == 1 and conflicts == []


def test_what_is_missing_in_one_run_may_be_in_the_other():
    missing = (whole("t5", 0).config,)
    runs = [(A, study(whole("rope", 0), missing=missing)), (B, study(whole("t5", 0)))]
    assert merge(runs)[0].missing == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 400}, r"a and b are of different recipes \(steps 100 and 400\)"),
        ({"corpus": "d", "lr": 0.5}, r"\(corpus c and d, lr 0.001 and 0.5\)"),
        ({"recipe": 1}, rf"recipe {RECIPE} and 1"),
        ({"test_lengths": (128, 256, 1024)}, r"test_lengths \(128, 256, 512\) and \(128, 256, 10"),
        ({"torch": "3"}, "torch 2 and 3"),
        ({"task": "copy"}, r"\(task text and copy\)"),
    ],
)
def test_other_recipes_are_refused_by_name(fields, said):
    ours, theirs = study(whole("rope", 0)), changed(study(whole("rope", 1)), **fields)
    with pytest.raises(ValueError, match=said):
        merge([(A, ours), (B, theirs)])


def test_every_field_of_a_trial_is_recipe_but_what_a_study_varies():
    """A field that is added later is part of the recipe until somebody says otherwise."""
    config = whole("rope", 0).config
    for field in dataclasses.fields(config):
        if field.name in ("encoding", "seed", "code", "source"):
            continue
        value = getattr(config, field.name)
        other = value + 1 if isinstance(value, int | float) else (*value, 1) if isinstance(
            value, tuple
        ) else f"{value}x"  # fmt: skip
        with pytest.raises(ValueError, match=rf"different recipes \({field.name} "):
            merge([(A, study(whole("rope", 0))),
                   (B, changed(study(whole("rope", 1)), **{field.name: other}))])  # fmt: skip


def test_changed_code_and_double_labels_are_refused():
    ours = changed(study(whole("rope", 0)), encoding="my.py:Mine", code="abc")
    theirs = changed(study(whole("rope", 1)), encoding="my.py:Mine", code="def")
    with pytest.raises(ValueError, match=r"my.py:Mine was other code in b \(hash def\) than in a"):
        merge([(A, ours), (B, theirs)])
    one, two = (changed(study(whole("rope", n)), source=s) for n, s in enumerate(("abc", "def")))
    with pytest.raises(ValueError, match=r"rope was other code in b \(hash def\) than in a"):
        merge([(A, one), (B, two)])
    ours = dataclasses.replace(ours, labels={"my.py:Mine": "rope"})
    with pytest.raises(ValueError, match=r"'rope' names two encodings, my\.py:Mine and rope"):
        merge([(A, ours), (B, study(whole("rope", 1)))])


def test_several_runs_are_one_page_and_stay_as_they_were(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = on_disk(tmp_path / "one", study(*(whole(e, s) for e in ("rope", "t5") for s in (0, 1))))
    two = study(whole("rope", 2, 2.5), whole("t5", 2, 2.5), whole("rope", 1, 2.7))
    two = dataclasses.replace(two, command="posenc compare two")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "study.json").write_text(two.to_json(), encoding="utf-8")  # no folders
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    code, out, err = call("report", "one", "two", "--out", "both", "--published")
    assert code == 0
    assert "Agreement with published orders" in out and ", tied)" in out
    assert "rope seed 1 has other numbers in two than in one" in err
    html = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "posenc report one two" in html and "rope" in html
    rows = (tmp_path / "both" / "results.csv").read_text(encoding="utf-8").splitlines()
    assert sum(row.startswith("by_length,128,") for row in rows) == 6
    assert {p: p.read_bytes() for p in before} == before
    found = report_runs([one, tmp_path / "two"])
    assert len(found.results) == 6
    assert len(list((tmp_path / "runs").glob("report-*/report.html"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["one", "none"], "none holds no study.json"),
        (["one", "two", "--out", "one"], "one is a run of posenc compare"),
        (["one", "other"], "one and other are of different recipes (steps 100 and 7)"),
        (["one", "two", "--out", "two/study.json"], "is not a folder"),
    ],
)
def test_what_cannot_be_one_report_is_refused(tmp_path, call, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    on_disk(tmp_path / "one", study(whole("rope", 0)))
    on_disk(tmp_path / "two", study(whole("rope", 1)))
    on_disk(tmp_path / "other", changed(study(whole("rope", 1)), steps=7))
    (tmp_path / "none").mkdir()
    code, _, error = call("report", *arguments)
    assert code == 2 and said in error and error.count("\n") == 1


def scored(means: dict[str, tuple[float, float, float]]) -> Study:
    return study(*(result(name, 0, each) for name, each in means.items()))


def test_a_run_of_study_json_alone_keeps_its_results(tmp_path, capsys):
    given = study(*(whole(name, seed) for name in ("rope", "t5") for seed in (0, 1, 2)))
    home = tmp_path / "published"
    home.mkdir()
    (home / "study.json").write_text(given.to_json(), encoding="utf-8")
    assert len(report_runs([home]).results) == 6
    back = Study.from_json((home / "study.json").read_text(encoding="utf-8"))
    assert back.results == given.results
    # A trial whose folder is there is what lies in it, here nothing yet.
    (home / given.trials[0].folder).mkdir()
    assert report_runs([home]).results == given.results[1:]


def test_agreement_is_counted_over_what_a_publication_separates():
    """At x1 KERPLE's text separates only the sinusoidal; at x2 rope too, at x4 all."""
    given = scored(
        {
            "t5": (1.0, 1.0, 1.5),
            "alibi": (1.1, 1.1, 1.4),  # at x4 before t5, against the publication
            "rope": (1.2, 1.5, 2.0),
            "sinusoidal": (1.3, 3.0, 4.0),
        }
    )
    found = {(a.table.split(" (")[0], a.multiple): a for a in published.agreements(given)}
    near = found["KERPLE, OpenWebText2", 1]
    assert (near.agreeing, near.pairs) == (3, 3)
    assert (found["KERPLE, OpenWebText2", 2].agreeing, found["KERPLE, OpenWebText2", 2].pairs) == (
        5,
        5,
    )
    far = found["KERPLE, OpenWebText2", 4]
    assert (far.agreeing, far.pairs, far.rho.value, far.rho.count) == (5, 6, 0.8, 4)
    assert far.rho.p > 0.08
    assert found["ALiBi, WikiText-103 at 512", 2].pairs == 0  # one seed separates nothing
    assert ("ALiBi, WikiText-103 at 512", 4) not in found  # 2,048 was not tested there
    assert ("ALiBi, WikiText-103 at 1024", 4) in found  # 4,024 is within 5 % of 4,096
    assert set(far.told) >= {("t5", "alibi"), ("alibi", "rope")}
    *_, total = published.rows(list(found.values()))
    agreeing = sum(a.agreeing for a in found.values() if a.multiple > 1)
    pairs = sum(a.pairs for a in found.values() if a.multiple > 1)
    share = f"{agreeing} of {pairs} ({agreeing / pairs:.2f}, p 0."
    assert total[-1].startswith(share) and agreeing < pairs
    left_out = [a.rho.value for a in found.values() if a.multiple > 1 and not a.pairs]
    assert total[2] == f"without {len(left_out)} tables that have no such pairs" and left_out
    assert total[3] == f"{min(left_out):.2f} to {max(left_out):.2f} there"
    assert agreement_table(list(found.values())).row_count == len(found) + 1


def test_agreement_needs_posencs_own_encodings_with_numbers():
    alone = scored({"t5": (1.0, 1.0, 1.0), "nope": (2.0, 2.0, 2.0)})
    assert published.agreements(alone) == []
    own = changed(scored({"t5": (1.0, 1.0, 1.0), "rope": (2.0, 2.0, 2.0)}), code="abc")
    assert published.agreements(own) == []
    cannot = scored({"t5": (1.0, None, None), "rope": (2.0, None, None)})
    assert {a.multiple for a in published.agreements(cannot)} == {1}


def test_tasks_agree_by_the_means_of_all_trials():
    def trials(**far):
        return study_of(
            *(
                task_result(name, seed, (0.5 if name == "alibi" else 1.0, value), "copy_512")
                for name, value in far.items()
                for seed in range(2)
            )
        )

    same = trials(nope=0.9, t5=0.5, alibi=0.3, rope=0.1, sinusoidal=0.1)
    (found,) = published.agreements(same)
    assert found.where == "unseen" and len(found.ours) == 5
    assert (found.agreeing, found.pairs) == (9, 9)  # rope and sinusoidal are both 0 there
    assert list(published.rows([found]))[-1][0] == "tasks, all tables"
    turned = trials(nope=0.1, t5=0.5, rope=0.9)
    assert published.agreements(turned)[0].agreeing == 0
    assert published.agreements(trials(nope=0.9, fire=0.2)) == []


def test_a_label_changes_nothing_of_the_agreement_on_the_page(tmp_path):
    trials = [
        task_result(name, seed, (1.0, far), "copy_512")
        for name, far in (("nope", 0.9), ("t5", 0.5))
        for seed in range(2)
    ]
    given = dataclasses.replace(study_of(*trials), labels={"nope": "mine"})
    write_page(given, tmp_path, published=True)
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "1 of 1" in page and "2: nope t5" in page


def test_published_tables_are_whole():
    tasks = json.loads(
        resources.files("posenc.compare.judge").joinpath("published_tasks.json").read_text()
    )
    for table in tasks:
        assert table["task"] in TASKS and {len(each) for each in table["seeds"].values()} == {3}
        assert all(0 <= value <= 1 for each in table["seeds"].values() for value in each)
    text = resources.files("posenc.compare.judge").joinpath("published.json").read_text()
    for table in json.loads(text):
        assert table["source"].startswith("arXiv:") and table["lengths"] == sorted(table["lengths"])
        for rows in (table["means"], table["deviations"]):
            assert all(len(row) == len(table["lengths"]) for row in rows.values())
        assert set(table["deviations"]) <= set(table["means"])
        assert bool(table["deviations"]) == (table["seeds"] > 1)
