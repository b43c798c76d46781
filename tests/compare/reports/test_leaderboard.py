"""`posenc leaderboard` prints what is published, and --json is alone on stdout."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from posenc.compare import run_study as studies
from posenc.compare.options import Options
from posenc.compare.page.report import report_of
from posenc.compare.plan.plan import make_plan
from posenc.compare.reports import leaderboard, report_runs
from posenc.files.sealed_json import HASH_KEY
from posenc.report.report import as_json, cell_text
from tests.compare.judging.test_answer import six
from tests.compare.judging.test_standing import of_tasks
from tests.compare.judging.test_summary import result, study
from tests.compare.reports.test_reports import on_disk, whole
from tests.experiment import experiment
from tests.test_numbers import rank

published_studies = experiment("leaderboard_plan").published_studies


def test_what_is_printed_is_what_the_published_trials_give():
    from tests.test_readme import load_script

    script = load_script("update_leaderboard")
    made = script.stored(published_studies())
    kept = leaderboard.board_file().read_text(encoding="utf-8")

    def numbers(text):  # to six digits: another processor may round the last ones otherwise
        found = json.loads(text, parse_float=lambda number: round(float(number), 6))
        return {key: value for key, value in found.items() if key != HASH_KEY}

    assert numbers(made) == numbers(kept), "run `make readme`"


def test_the_published_answer_names_a_row_and_what_it_costs_for_each_use():
    kept = json.loads(leaderboard.board_file().read_text(encoding="utf-8"))
    uses = kept["answer"].split(". ")
    assert [use.partition(":")[0] for use in uses] == [
        "Short context, 128 bytes",
        "Long context, the last 128 of 1,024 bytes",
        "Of five at 0.9 M parameters",
        "Copying and recall",
    ]
    near, far, _, tasks = uses
    assert all("training time" in use for use in (near, far, tasks))


def test_the_published_matrix_is_printed_without_computing_anything(capsys):
    leaderboard.show_published(False)
    shown = " ".join(capsys.readouterr().out.split())
    (mean,) = rank("tasks", "dape")
    assert f"dape (mean rank {mean:.2f} over 6 tasks; " in shown
    assert "Short context, 128 bytes: " in shown
    assert "What this cannot say: " in shown
    assert f"{mean:.2f} (1)" in shown and shown.index("dape") < shown.index("sinusoidal")
    code = (
        "import sys; from posenc.compare.reports.leaderboard import show_published\n"
        "show_published(True)\n"
        "bad = {'torch', 'scipy', 'numpy', 'matplotlib'} & sys.modules.keys(); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["studies"]["tasks"]["use"] == ["dape"]


def test_the_command_shows_the_stored_answer(call, tmp_path):
    assert call("leaderboard")[1].startswith("Short context, 128 bytes: ")
    code, _, said = call("leaderboard", "--mine", tmp_path)
    assert code == 2 and "No such option" in said and "--mine" in said


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"answer": "t5"}', '{"answer": 1, "studies": 2}']
)
def test_a_damaged_file_of_the_leaderboard_is_named(call, tmp_path, monkeypatch, text):
    path = tmp_path / "board.json"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(leaderboard, "board_file", lambda: path)
    for given in ((), ("--json",)):
        code, out, said = call("leaderboard", *given)
        assert (code, out) == (2, "") and "board.json" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda text: text.replace('"mean": 1.', '"mean": 0.', 1), "its hash differs"),
        (lambda text: text.replace('"encodings": [', '"encoding": [', 1), "its hash differs"),
        (lambda text: text.replace('"tier": 1', '"tier": "1"', 1), "its hash differs"),
        (lambda text: text[: len(text) // 2], "line"),
        (lambda text: text.replace(f'"{HASH_KEY}"', '"seal"', 1), f"it has no {HASH_KEY}"),
    ],
)
def test_one_changed_field_of_the_leaderboard_is_refused(call, tmp_path, monkeypatch, change, why):
    text = leaderboard.board_file().read_text(encoding="utf-8")
    path = tmp_path / "board.json"
    path.write_text(change(text), encoding="utf-8")
    monkeypatch.setattr(leaderboard, "board_file", lambda: path)
    for given in ((), ("--json",)):
        code, out, said = call("leaderboard", *given)
        assert (code, out) == (2, "") and said.count("\n") == 1
        assert f"{path} cannot be read (" in said and why in said and "Install posenc again" in said


def test_the_matrix_has_one_line_an_encoding_at_80_columns(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("leaderboard")[1].splitlines()
    found = json.loads(leaderboard.board_file().read_text(encoding="utf-8"))
    made = [row for table in leaderboard.report_of(found).tables().values() for row in table.rows]
    rows = [line for line in lines if line.startswith("│")]
    for line, cells in zip(rows, made, strict=True):
        shown = [text.strip() for text in line.strip("│").split("│")]
        assert shown == [cell_text(cell) for cell in cells]
        assert cell_len(line) <= 80 and "…" not in line


def test_json_has_the_numbers_behind_the_answer(tmp_path):
    given = studies.conclude(six())
    found = json.loads(as_json(report_of(given, tmp_path)))
    assert "report" not in found and "study" not in found  # neither file exists
    assert found["answer"] == given.recommendation and found["cannot_say"] == given.limits
    near, far = found["places"]
    assert (near["where"], far["where"]) == ("128 bytes", "the last 128 of 512 bytes")
    assert found["use"] == far["first"] == ["t5"]
    assert found["trials"]["finished"] == 8
    first, *_, last = near["encodings"]
    assert (first["encoding"], first["verdict"], first["minus_first"]) == ("t5", "best", None)
    assert last["verdict"] == "worse" and last["minus_first"] > last["half_over_seeds"] > 0
    assert last["seeds"].keys() == {"0", "1"} and last["half_over_windows"] is None
    alone = json.loads(as_json(report_of(studies.conclude(study(result("rope", 0, (2.0, 2, 2)))))))
    assert alone["places"][0]["least_difference"] is None and "report" not in alone
    scores = {"t5": (0.9, 0.8), "rope": (0.1, 0.3), "nope": (0.2, 0.2)}
    ranks, *tasks = json.loads(as_json(report_of(studies.conclude(of_tasks(scores)))))["places"]
    assert ranks["unit"] == "mean rank" and not ranks["higher_is_better"]
    assert [each["where"] for each in tasks] == ["copy", "reverse", "recall"]
    assert all(each["higher_is_better"] for each in tasks)


def test_report_prints_json_alone(tmp_path, capsys):
    run = on_disk(tmp_path / "run", study(*(whole(e, s) for e in ("rope", "t5") for s in (0, 1))))
    report_runs.report_runs([run], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(run / "report.html") and Path(found["study"]).is_file()


def test_json_of_a_dry_run_is_refused():
    with pytest.raises(ValueError, match="--json prints an answer, and --dry-run has none"):
        make_plan(Options(["rope"], as_json=True, dry_run=True))


def test_what_was_not_tested_is_null_and_no_number():
    given = studies.conclude(study(result("rope", 0, (2.0, 2, None)), result("t5", 0, (2.1, 2, 2))))
    text = as_json(report_of(given))
    assert "NaN" not in text and "Infinity" not in text and str(math.inf) not in text.split()
