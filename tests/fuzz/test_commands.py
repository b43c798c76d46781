"""A short run of the fuzzer over command lines, whose checks detect planted failures."""

import random
import time

import pytest

from posenc.command_line import main as cli
from tests.fuzz import commands


def test_command_lines_end_well(tmp_path):
    (tmp_path / "inner").mkdir()
    assert commands.fuzz(30, 20261121, tmp_path / "inner", only=("list", "compare", "report")) == []


@pytest.mark.slow
def test_command_lines_that_run_end_well(tmp_path):
    (tmp_path / "inner").mkdir()
    assert commands.fuzz(300, 20261124, tmp_path / "inner") == []


@pytest.mark.slow
def test_every_sound_line_is_accepted(tmp_path, monkeypatch):
    """A refused one is drawn again and again, as that of the command that is accepted least."""
    commands.world.build(tmp_path)
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    refused = []
    with commands.without_the_work():
        for name, _ in commands.leaves(commands.cli.app()):
            for _ in range(0 if name == "report" else 20):  # studies of two recipes are refused
                line = commands.sound(rng, name)
                if line and commands.run(line).code == 2:
                    refused.append(line)
    assert refused == []


REFUSED = "posenc: it is refused for a reason.\n"


def test_too_many_refusals_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "FEWEST", 4)
    monkeypatch.setattr(commands, "run", lambda line: commands.Ended(line, 2, "", REFUSED, 0.0))
    assert commands.fuzz(4, 0, tmp_path) == ["only 0 of 4 were accepted"]


def test_a_command_and_an_option_that_are_tried_too_seldom_are_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "MANY", 40)
    monkeypatch.setattr(commands, "ACCEPTED", 5)
    monkeypatch.setattr(commands, "DRAWN", 2)
    monkeypatch.setattr(commands, "run", lambda line: commands.Ended(line, 0, "", "", 0.0))
    for name in ("all", "some"):
        (tmp_path / name).mkdir()
    assert commands.fuzz(40, 0, tmp_path / "all", only=("list", "explore")) == []
    assert "explore: " in capsys.readouterr().out
    drawn = (["list", "--json"], [("list", "as_json")])
    monkeypatch.setattr(commands, "draw", lambda *counts: drawn)
    wrong = commands.fuzz(40, 0, tmp_path / "some", only=("list", "explore"))
    assert "explore: 0 accepted" in wrong and "explore out: 0 drawn" in wrong
    assert not any(line.startswith(("list: ", "list as_json")) for line in wrong)


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        (lambda: 1 / 0, "ended with 1 and 0 lines"),
        (lambda: print("Traceback (most recent call last)"), "showed a traceback"),
        (lambda: cli.sys.exit(3), "ended with 3"),
        (lambda: cli.sys.exit("a word"), "ended with 'a word'"),
        (lambda: cli.sys.exit(2), "ended with 2 and 0 lines"),
        (lambda: exec("while True: pass"), "raised Hangs"),
        (lambda: time.sleep(60), "raised Hangs"),
    ],
)
def test_what_may_not_be_is_seen(monkeypatch, planted, problem):
    if problem == "raised Hangs":
        monkeypatch.setattr(commands, "SECONDS", 0.2)
    monkeypatch.setattr(cli, "_refuse_empty", lambda arguments: planted())
    monkeypatch.setattr(cli, "_write_error", lambda text, code, error=None: code)
    assert problem in commands.run(["--version"]).wrong()


def test_good_and_bad_command_lines_are_let_pass():
    assert commands.run(["--version"]).wrong() == ""
    ended = commands.run(["lisst"])
    assert (ended.code, ended.wrong()) == (2, "")


@pytest.mark.parametrize("joined", [True, False])
def test_an_output_with_a_space_in_its_name_may_be_replaced(tmp_path, monkeypatch, joined):
    out = ["--out=notes [1].txt"] if joined else ["--out", "notes [1].txt"]
    monkeypatch.setattr(commands, "draw", lambda *drawn: (["explore", *out], []))
    (tmp_path / "inner").mkdir()
    assert commands.fuzz(1, 0, tmp_path / "inner") == []


def test_leftovers_and_changed_files_are_seen(tmp_path, monkeypatch):
    def spoil(arguments):
        (tmp_path / "text.txt").write_bytes(b"")
        (tmp_path / ".x.1.partial").write_bytes(b"")
        return commands.Ended(arguments, 0, "", "", 0.0)

    monkeypatch.setattr(commands, "run", spoil)
    left, changed = commands.fuzz(1, 0, tmp_path)
    assert "left [" in left and changed == "changed text.txt"
