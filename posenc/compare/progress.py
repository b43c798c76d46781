"""How a sweep tells what it does: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from posenc.compare.results import TrialResult
from posenc.compare.trial import TrialConfig

LINES = 10
"""Plain lines per trial."""


def name_of(trial: TrialConfig) -> str:
    return f"{trial.encoding} seed {trial.seed}"


class PlainLines:
    """Lines at every tenth of a trial."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began: dict[TrialConfig, tuple[float, int]] = {}
        self.said: dict[TrialConfig, int] = {}

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        began, first = self.began.setdefault(trial, (time.monotonic(), step))
        part = step * LINES // trial.steps
        if part > self.said.setdefault(trial, first * LINES // trial.steps):
            self.said[trial] = part
            left = (time.monotonic() - began) / (step - first) * (trial.steps - step)
            self._say(
                f"{name_of(trial)}: step {step} of {trial.steps}, loss {loss:.3f} bits per byte, "
                f"{clock(left)} left"
            )

    def testing(self, trial: TrialConfig) -> None:
        self._say(f"{name_of(trial)}: testing")

    def note(self, trial: TrialConfig, text: str) -> None:
        self._say(f"{name_of(trial)}: {text}")

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        self._say(outcome(trial, result))

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveBars:
    """One bar for the sweep and one for each running trial, with loss and time left."""

    def __init__(self, console: Console, trials: Sequence[TrialConfig], workers: int) -> None:
        self.steps = dict.fromkeys(trials, 0)
        self.workers = workers
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[at]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        total = sum(trial.steps for trial in trials)
        self.all = self.progress.add_task("all trials", total=total, at="", left="")
        self.bars: dict[TrialConfig, TaskID] = {}
        self.began: dict[TrialConfig, tuple[float, int]] = {}
        self.pace = 0.0

    def __enter__(self) -> LiveBars:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        now = time.monotonic()
        began, first = self.began.setdefault(trial, (now, step))
        left = ""
        if step > first:
            self.pace = (now - began) / (step - first)
            left = f"{clock(self.pace * (trial.steps - step))} left"
        self.steps[trial] = step
        self.progress.update(
            self._bar(trial), completed=step, at=f"loss {loss:.3f} bits/byte", left=left
        )
        self._update_all()

    def testing(self, trial: TrialConfig) -> None:
        self.progress.update(self._bar(trial), completed=trial.steps, at="testing", left="")

    def note(self, trial: TrialConfig, text: str) -> None:
        self.progress.console.print(escape(f"{name_of(trial)}: {text}"), highlight=False)

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        if trial in self.bars:
            self.progress.remove_task(self.bars.pop(trial))
        self.steps[trial] = trial.steps
        self.progress.console.print(escape(outcome(trial, result)), highlight=False)
        self._update_all()

    def _bar(self, trial: TrialConfig) -> TaskID:
        if trial not in self.bars:
            self.bars[trial] = self.progress.add_task(
                name_of(trial), total=trial.steps, at="", left=""
            )
        return self.bars[trial]

    def _update_all(self) -> None:
        done = sum(self.steps.values())
        left = self.pace * (sum(t.steps for t in self.steps) - done) / self.workers
        self.progress.update(
            self.all,
            completed=done,
            at=f"{sum(s == t.steps for t, s in self.steps.items())} of {len(self.steps)}",
            left=f"{clock(left)} left" if self.pace else "",
        )


def outcome(trial: TrialConfig, result: TrialResult) -> str:
    """One line about a trial that has ended."""
    if result.reason is not None:
        return f"{name_of(trial)}: failed: {result.reason}"
    scores = ", ".join(
        f"{s.length}: cannot" if s.bits_per_byte is None else f"{s.length}: {s.bits_per_byte:.3f}"
        for s in result.by_length
    )
    return f"{name_of(trial)}: done; bits per byte at {scores}"


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02}"
    return f"{minutes // 60} h {minutes % 60:02} min"
