"""Wrong input to the scripts of experiments/: one line, and posenc's exit codes."""

import argparse
import errno

import pytest

from posenc.command_line.errors import RunFailed, Stopped
from tests.experiment import experiment

refused = experiment("refused")
budget = experiment("budget")
HEADER = "measure,at,train_length,steps,lr,recipe,encoding,seed,bits_per_byte\n"
ROWS = "".join(
    f"by_length,8,8,{steps},0.002,4,rope,{seed},2.0\n" for steps, seed in ((9, 0), (8, 1))
)


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (Stopped("it goes on from here"), 130, "s.py: stopped; it goes on from here."),
        (KeyboardInterrupt(), 130, "s.py: stopped."),
        (RunFailed("rope\nfailed"), 1, "s.py: rope failed"),
        (OSError(errno.ENOSPC, "No space left"), 1, "s.py: the disk is full: [Errno 28] No space"),
        (FileNotFoundError("no such file"), 2, "s.py: error: no such file"),
        (ValueError("wrong"), 2, "s.py: error: wrong"),
    ],
)
def test_each_way_to_fail_has_its_line_and_its_code(raised, code, words, capsys):
    with pytest.raises(SystemExit) as end, refused.refusing(argparse.ArgumentParser("s.py")):
        raise raised
    assert end.value.code == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(words)


def test_what_is_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(AssertionError), refused.refusing(argparse.ArgumentParser("s.py")):
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nothere"], "No such file or directory: 'nothere/results.csv'"),
        (["empty"], "expected trials of one budget, got no score."),
        (["mixed"], "got 8 steps, lr 0.002, recipe 4; 9 steps, lr 0.002, recipe 4."),
        (["empty", "--table", "empty"], "--table: empty is not a file."),
    ],
)
def test_wrong_input_is_refused_and_nothing_is_written(given, words, tmp_path, monkeypatch, run):
    for name, rows in (("empty", ""), ("mixed", ROWS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.csv").write_text(HEADER + rows, encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    code, _, err = run(budget, "--table", "new/table.csv", *given)
    said = err.splitlines()[-1]
    assert code == 2 and words in said and said.startswith("budget.py: error: ")
    left = [p for p in sorted(tmp_path.rglob("*")) if p not in before and p.is_file()]
    assert not left
