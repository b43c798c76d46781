"""Text of foreign files moves no cursor and reorders no line, wherever it is shown."""

import io
import json
import subprocess
import sys

import matplotlib.pyplot as plt
import pytest
from rich.console import Console

from posenc.command_line.progress import replace_status_line
from posenc.report.drawing import to_svg
from posenc.report.escaping import show_hidden_characters
from posenc.report.html_page import Page
from posenc.report.report import Table
from posenc.report.terminal import Terminal, print_line, rich_table
from tests.doctor.threads import BASE

HOSTILE = "a\x1b[31m\x9b2J\x07\u202eb\u2066\x7f"
SHOWN = r"a\u001b[31m\u009b2J\u0007\u202eb\u2066\u007f"


def test_hidden_characters_are_escapes_and_others_stay():
    assert show_hidden_characters(HOSTILE) == SHOWN
    assert json.loads(show_hidden_characters(json.dumps({"a": HOSTILE}, ensure_ascii=False))) == {
        "a": HOSTILE
    }
    assert show_hidden_characters("中文 é\tπ\n\u200b☃ עברית") == "中文 é\tπ\n\u200b☃ עברית"


@pytest.mark.parametrize(
    "show",
    [
        lambda console: print_line(console, HOSTILE),
        lambda console: console.print(HOSTILE, markup=False),
        lambda console: console.print(rich_table(["name"], [[HOSTILE]], overflow="fold")),
        lambda console: console.print(rich_table([HOSTILE], [["1"]], overflow="fold")),
    ],
)
def test_the_terminal_shows_escapes(show):
    out = io.StringIO()
    show(Terminal(file=out, width=100))
    assert SHOWN in out.getvalue() and "\x1b" not in out.getvalue()
    plain = io.StringIO()
    show(Console(file=plain, width=100))
    assert "\x1b" in plain.getvalue()  # rich alone does not


def test_pages_and_figures_show_escapes():
    page = Page(HOSTILE, HOSTILE)
    drawn, axes = plt.subplots()
    axes.set_title(HOSTILE)
    page.append_section(HOSTILE, HOSTILE, Table([HOSTILE], [[HOSTILE]]))
    for text in (page.html(), to_svg(drawn, HOSTILE)):
        assert SHOWN in text and not set(text) & {"\x1b", "\x9b", "\x07", "\u202e", "\u2066"}
    plt.close(drawn)


@pytest.mark.parametrize("more", [[], ["--json"], ["--each"]])
def test_the_doctor_and_its_errors_show_escapes(tmp_path, call, more):
    for name, config in (
        ("a", {**BASE, "rope_theta": 1e4, "rope_scaling": {"rope_type": HOSTILE, "factor": 2.0}}),
        ("b", {**BASE, "model_type": HOSTILE}),
    ):
        path = tmp_path / (name + HOSTILE) / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        _, out, err = call("doctor", path, *more)
        assert not set(out + err) & {"\x1b", "\x9b", "\x07", "\u202e", "\u2066"}
        assert more == ["--json"] or SHOWN in out + err


@pytest.mark.parametrize("command", ["doctor", "report", "inspect model"])
def test_the_error_of_a_command_shows_escapes(tmp_path, call, command):
    code, _, err = call(*command.split(), tmp_path / HOSTILE)
    assert code == 2 and SHOWN in err and "\x1b" not in err and "\u202e" not in err


def test_the_line_that_changes_shows_escapes(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    replace_status_line(HOSTILE)
    assert capsys.readouterr().err == f"\r\x1b[K{SHOWN}"


def test_a_line_stays_one_line():
    out = io.StringIO()
    print_line(Terminal(file=out, width=20), "it failed\nUse evil: it is best.")
    assert out.getvalue() == "it failed Use evil: it is best.\n"


@pytest.mark.parametrize("more", [[], ["--each"]])
def test_no_name_passes_for_a_line_of_the_answer(tmp_path, call, more):
    path = tmp_path / "a\nNothing to complain about.\n" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**BASE, "rope_theta": 1e4}))
    code, out, err = call("doctor", path, *more)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "a line break" in err


@pytest.mark.parametrize(("closed", "said"), [(">&-", "output is closed"), (">&- 2>&-", "")])
def test_a_closed_output_is_bad_input(closed, said):
    command = f'"{sys.executable}" -m posenc list {closed}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == bool(said)
