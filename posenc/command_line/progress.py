"""Show progress: live bars or one changing line on a terminal, otherwise plain lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from posenc.report.escaping import show_hidden_characters
from posenc.report.terminal import print_line


def replace_status_line(text: str) -> None:
    """Replace the line on stderr by `text`, or clear it by ""; does nothing without a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{show_hidden_characters(text)}")
        sys.stderr.flush()


@contextmanager
def status_line_while_loading(text: str) -> Iterator[None]:
    """Show on a terminal what a command will do, while it imports what takes seconds."""
    replace_status_line(text)
    try:
        yield
    finally:
        replace_status_line("")


def readable_duration(seconds: float) -> str:
    """Return a duration in words: minutes and seconds, hours and minutes, or, from 48 hours on,
    days.

    >>> readable_duration(61.4), readable_duration(7260), readable_duration(200_000)
    ('1:01', '2 h 01 min', '2.3 days')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes / (24 * 60):,.1f} days"


class Pace:
    """Measures seconds per step, from the step with which it is made."""

    def __init__(self, step: int) -> None:
        self.start_time = time.monotonic()
        self.first_step = step

    def seconds_per_step(self, step: int) -> float | None:
        """Return the mean seconds per step until `step`; None before the second one."""
        if step <= self.first_step:
            return None
        return (time.monotonic() - self.start_time) / (step - self.first_step)


class Bars(Progress):
    """Show live bars on a terminal, each with a name, a remark and the time left."""

    def __init__(self, console: Console) -> None:
        # No markup: rich would take brackets in a name or remark for its own.
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[remark]}", markup=False),
            TextColumn("{task.fields[left]}", markup=False),
            console=console,
            expand=True,
        )
        self.bar_ids: dict[str, TaskID] = {}

    def show(
        self, name: str, done: int, total: int, remark: str = "", seconds_left: float | None = None
    ) -> None:
        """Update the bar `name`, of which `done` of `total` units are done; the first call makes
        it."""
        if name not in self.bar_ids:
            self.bar_ids[name] = self.add_task(
                show_hidden_characters(name), total=total, remark="", left=""
            )
        time_left = "" if seconds_left is None else f"{readable_duration(seconds_left)} left"
        self.update(self.bar_ids[name], completed=done, remark=remark, left=time_left)

    def remove(self, name: str) -> None:
        """Remove the bar, if there is one."""
        if name in self.bar_ids:
            self.remove_task(self.bar_ids.pop(name))

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(show_hidden_characters(text), highlight=False, markup=False, emoji=False)


class Narrator(Progress):
    """Shows one job whose task changes: a bar on a terminal, otherwise a line when the task
    changes, at most one in PAUSE seconds.

    Call the object with the current task in words, and the fraction of the whole job, 0 to 1, that
    is done.
    """

    PAUSE = 2.0
    """Least time between two plain lines, in seconds; chosen."""

    def __init__(self, console: Console, first_task: str = "") -> None:
        """first_task: what a terminal shows until the first call."""
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task_id = self.add_task(show_hidden_characters(first_task), total=1.0)
        self.last_task = ""
        self.last_line_time = 0.0
        self.start_time = time.monotonic()
        self.start_fraction = 0.0
        self.last_fraction = 0.0

    def stop(self) -> None:
        """Remove the bar. On a stream that is no terminal there is none: rich 13 would print an
        empty line for it."""
        if self.console.is_terminal:
            super().stop()

    def __call__(self, task: str, fraction: float) -> None:
        """Show the current task, and the fraction of the whole job, 0 to 1, that is done."""
        now = time.monotonic()
        # Another job has begun, or the first one after what comes before it, as loading.
        if fraction < self.last_fraction or fraction == 0:
            self.start_time = now
            self.start_fraction = fraction
        self.last_fraction = fraction
        time_left = self._time_left_in_words(now)
        self.update(
            self.task_id,
            description=show_hidden_characters(task) + time_left,
            completed=fraction,
        )
        is_due = now - self.last_line_time > self.PAUSE
        if not self.console.is_terminal and task != self.last_task and is_due:
            print_line(self.console, f"{task} ({fraction:.0%}{time_left})")
            self.last_task = task
            self.last_line_time = now

    def _time_left_in_words(self, now: float) -> str:
        """Return a clause on the time that the job will still take at its pace so far, from its
        first step on; "" in the first second."""
        done = self.last_fraction - self.start_fraction
        if done <= 0 or now - self.start_time < 1:
            return ""
        seconds_left = (now - self.start_time) * (1 - self.last_fraction) / done
        return f", about {readable_duration(seconds_left)} left"
