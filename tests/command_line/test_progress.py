"""Progress is live on a terminal and plain elsewhere."""

import io

import pytest
from rich.console import Console

from posenc.command_line.progress import Bars, Narrator, Pace, readable_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (61.4, "1:01"), (7260, "2 h 01 min"), (86400 * 400, "400.0 days")],
)
def test_clock(seconds, text):
    assert readable_duration(seconds) == text


def test_pace_needs_two_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = Pace(4)
    now[0] += 6
    assert pace.seconds_per_step(4) is None
    assert pace.seconds_per_step(7) == 2.0


def terminal() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)


def test_bars_show_name_remark_and_time_left_and_print_lines_as_they_are():
    console = terminal()
    with Bars(console) as bars:
        bars.show("[b]name[/b]:bug:", 3, 4, "a remark", 61)
        bars.print_line("a [bold]line[/bold] of :bug:")
    text = console.file.getvalue()
    assert "[b]name[/b]:bug:" in text and "a remark" in text and "1:01 left" in text
    assert "a [bold]line[/bold] of :bug:" in text


def test_removed_bar_is_gone():
    console = terminal()
    bars = Bars(console)
    bars.show("gone", 1, 2)
    bars.show("here", 1, 2)
    bars.remove("gone")
    bars.remove("never there")
    with bars:
        pass
    assert "here" in console.file.getvalue() and "gone" not in console.file.getvalue()


def test_narrator_says_a_task_once_and_waits_between_lines(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Narrator(Console(file=out, width=80)) as narrate:
        narrate("first [task]", 0.1)
        now[0] += 1
        narrate("too soon", 0.2)
        now[0] += 5
        narrate("first [task]", 0.3)
        narrate("second", 0.5)
    assert out.getvalue().splitlines() == [
        "first [task] (10%)",
        "second (50%, about 0:06 left)",
    ]


def test_narrator_counts_the_time_left_of_each_job_by_itself(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Narrator(Console(file=out, width=80)) as narrate:
        now[0] += 100
        narrate("measuring", 0.9)
        now[0] += 10
        narrate("tuning", 0.0)  # another job begins
        now[0] += 30
        narrate("tuning on", 0.25)
    assert out.getvalue().splitlines() == [
        "measuring (90%, about 0:11 left)",
        "tuning (0%)",
        "tuning on (25%, about 1:30 left)",
    ]


def test_narrator_says_the_time_from_the_first_step_and_keeps_it_up_to_date(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Narrator(Console(file=out, width=80)) as narrate:
        now[0] += 60  # loading
        narrate("tuning", 0.0)
        for step, seconds in enumerate((10, 20, 20), start=1):
            now[0] += seconds
            narrate(f"tuning, loss {step}", step / 200)
    assert out.getvalue().splitlines() == [
        "tuning (0%)",
        "tuning, loss 1 (0%, about 33:10 left)",  # 199 steps of 10 seconds
        "tuning, loss 2 (1%, about 49:30 left)",  # 198 of 15
        "tuning, loss 3 (2%, about 54:43 left)",
    ]


def test_narrator_leaves_nothing_but_the_bar_on_a_terminal():
    console = terminal()
    with Narrator(console) as narrate:
        narrate("measuring :bug:", 0.5)
    assert "measuring :bug:" in console.file.getvalue() and "(50%)" not in console.file.getvalue()
