"""No file that posenc compare did not write is replaced."""

import pytest

from tests.compare.judging.test_summary import study
from tests.compare.reports.test_reports import on_disk, whole
from tests.texts import prose

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = (
    "--steps 1 --batch 1 --width 8 --layers 1 --heads 1 --train-length 16 --test-lengths 16 "
    "--seeds 1 --workers 1 --text text.txt"
).split()


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """theirs(NAME=content, ...): a user's folder with these files; it asserts that they stay"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(prose(10_500))
    (tmp_path / "theirs").mkdir()
    made = {}

    def write(**files):
        for name, content in files.items():
            path = tmp_path / "theirs" / name.replace("_", ".")
            path.write_text(content, encoding="utf-8")
            made[path] = content

    yield write
    assert {p: p.read_text(encoding="utf-8") for p in (tmp_path / "theirs").iterdir()} == made


@pytest.mark.parametrize("content", ['{"best_trial": 3}', "", "[1]", '{"sha256": "abc"}', "\xff"])
def test_a_folder_with_a_study_of_another_program_is_refused(theirs, call, content):
    theirs(study_json=content, results_csv="mine", report_html="mine")
    code, _, said = call("compare", "rope", *TINY, "--out", "theirs")
    assert code == 2 and "theirs is not empty and was not written by posenc compare" in said


@pytest.mark.parametrize("name", ["report_html", "results_csv"])
def test_a_report_over_files_of_the_user_is_refused(theirs, tmp_path, call, name):
    on_disk(tmp_path / "run", study(whole("rope", 0), whole("t5", 0)))
    theirs(**{name: "mine,at"})
    code, _, said = call("report", "run", "--out", "theirs")
    assert code == 2 and f"{name.replace('_', '.')} is not posenc's. Choose another folder." in said


def test_a_report_of_posenc_is_replaced(theirs, tmp_path, call):
    on_disk(tmp_path / "run", study(whole("rope", 0), whole("t5", 0)))
    for _ in range(2):
        assert call("report", "run", "--out", "again")[0] == 0


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize("out", ["text.txt", "text.txt/x", "text.txt/x/y"])
def test_a_file_in_the_way_is_refused_before_anything_is_measured(theirs, call, out, dry):
    code, shown, said = call("compare", "rope", *TINY, "--out", out, *dry)
    assert (code, shown, said) == (2, "", "posenc: --out: text.txt is not a folder.\n")
