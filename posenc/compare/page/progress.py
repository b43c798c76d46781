"""The progress of a comparison: live bars on a terminal, plain lines elsewhere."""

from collections.abc import Sequence

from rich.console import Console

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.report.page.progress import Bars, Pace, clock, say
from posenc.tasks.known import TEXT
from posenc.tasks.task import Case

LINES_PER_TRIAL = 10
"""Plain lines per trial: chosen."""
ALL_TRIALS = "all trials"
"""Name of the bar of all trials together."""


def unit_of_loss(trial: TrialConfig) -> str:
    """Return what a trial's loss in bits is counted for: "byte" of a text, "target" of a task."""
    return "byte" if trial.task == TEXT else "target"


class PlainLines:
    """Print a line at every tenth of a trial."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.paces: dict[TrialConfig, Pace] = {}
        self.tenths_printed: dict[TrialConfig, int] = {}

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        """Print step, loss and the time left if the trial has come to another tenth."""
        pace = self.paces.setdefault(trial, Pace(step))
        tenth = step * LINES_PER_TRIAL // trial.steps
        # A trial that goes on from a checkpoint begins with the tenth it had reached.
        first_tenth = pace.first * LINES_PER_TRIAL // trial.steps
        if tenth > self.tenths_printed.setdefault(trial, first_tenth):
            self.tenths_printed[trial] = tenth
            left = (pace.seconds_per_step(step) or 0.0) * (trial.steps - step)
            progress = (
                f"step {step} of {trial.steps}, loss {loss:.3f} bits per {unit_of_loss(trial)}"
            )
            self.note(trial, f"{progress}, {clock(left)} left")

    def testing(self, trial: TrialConfig) -> None:
        """Print that the trial is tested now."""
        self.note(trial, "testing")

    def note(self, trial: TrialConfig, text: str) -> None:
        """Print a line about the trial."""
        say(self.console, f"{describe_trial(trial)}: {text}")

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        """Print the scores of a trial that has ended, or why it failed."""
        say(self.console, describe_outcome(trial, result))


class LiveBars:
    """Show one bar for all trials and one per running trial, with loss and time left."""

    def __init__(self, console: Console, trials: Sequence[TrialConfig], workers: int) -> None:
        self.bars = Bars(console)
        self.steps = dict.fromkeys(trials, 0)
        self.total = sum(trial.steps for trial in trials)
        self.workers = workers
        self.paces: dict[TrialConfig, Pace] = {}
        self.seconds_per_step: float | None = None
        self._show_total()

    def __enter__(self) -> "LiveBars":
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        """Update the bars of the trial and of all trials."""
        seconds = self.paces.setdefault(trial, Pace(step)).seconds_per_step(step)
        self.seconds_per_step = seconds or self.seconds_per_step
        self.steps[trial] = step
        left = None if seconds is None else seconds * (trial.steps - step)
        remark = f"loss {loss:.3f} bits/{unit_of_loss(trial)}"
        self.bars.show(describe_trial(trial), step, trial.steps, remark, left)
        self._show_total()

    def testing(self, trial: TrialConfig) -> None:
        """Fill the bar of the trial, and show that it is tested now."""
        self.bars.show(describe_trial(trial), trial.steps, trial.steps, "testing")

    def note(self, trial: TrialConfig, text: str) -> None:
        """Print a line about the trial above the bars."""
        self.bars.say(f"{describe_trial(trial)}: {text}")

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        """Replace the bar of a trial that has ended by a line with its scores, or why it failed."""
        self.bars.remove(describe_trial(trial))
        self.steps[trial] = trial.steps
        self.bars.say(describe_outcome(trial, result))
        self._show_total()

    def _show_total(self) -> None:
        """Update the bar of all trials: steps done, trials ended, and the time left if all workers
        are as fast as the last step that was seen."""
        done = sum(self.steps.values())
        left = None
        if self.seconds_per_step is not None:
            left = self.seconds_per_step * (self.total - done) / self.workers
        ended = sum(step == trial.steps for trial, step in self.steps.items())
        self.bars.show(ALL_TRIALS, done, self.total, f"{ended} of {len(self.steps)}", left)


def describe_outcome(trial: TrialConfig, result: TrialResult) -> str:
    """Return a line about a trial that has ended."""
    if result.reason is not None:
        return f"{describe_trial(trial)}: failed: {result.reason}"
    numbers = [(str(score.length), score.bits_per_byte) for score in result.by_length]
    numbers += [(str(Case(s.length, s.variant)), s.exact_match) for s in result.by_case]
    scores = ", ".join(f"{at}: {'cannot' if n is None else f'{n:.3f}'}" for at, n in numbers)
    metric = "bits per byte" if trial.is_on_text else "exact match"
    return f"{describe_trial(trial)}: done; {metric} at {scores}"
