"""Scores of a trained model: by length, of far targets, by position, of a task's cases."""

from collections.abc import Sequence
from dataclasses import dataclass

from posenc.compare.trial.config import MAX_ENTRIES
from posenc.files.sealed_json import Record, check_count, check_rising, check_text_length


@dataclass(frozen=True)
class LengthScore(Record):
    """Bits per byte at one window length, or the reason why the encoding cannot run there.

    windows: bits per byte of each held-out window of this length, in the order of the text; empty
        if they were not kept.
    """

    length: int
    bits_per_byte: float | None
    cannot: str | None = None
    windows: tuple[float, ...] = ()

    def check(self) -> None:
        check_count("length", self.length, 1)
        for loss in (self.bits_per_byte, *self.windows):
            check_loss(loss)
        check_text_length("the reason", self.cannot or "", MAX_ENTRIES)
        if (self.bits_per_byte is None) == (self.cannot is None):
            raise ValueError("expected a loss, or the reason why there is none.")


READINGS = ("trained", "window", "tuned")
"""How the weights of a trial are read: as trained; with attention limited to the last `test_window`
tokens; after a short tuning at the longest test length."""


@dataclass(frozen=True)
class FarScore(Record):
    """Bits per byte of the far targets of the windows of one length: the last train_length of each;
    or the reason why the encoding cannot run there.

    far: with all tokens of the window. far_near: the same targets with at most train_length tokens
        of context; see posenc.compare.trial.objectives.
    windows, near_windows: the same by window, in the order of the text.
    """

    length: int
    far: float | None
    far_near: float | None
    cannot: str | None = None
    windows: tuple[float, ...] = ()
    near_windows: tuple[float, ...] = ()

    def check(self) -> None:
        check_count("length", self.length, 2)
        for loss in (self.far, self.far_near, *self.windows, *self.near_windows):
            check_loss(loss)
        check_text_length("the reason", self.cannot or "", MAX_ENTRIES)
        if (self.far is None) == (self.cannot is None):
            raise ValueError("expected a loss of far targets, or the reason why there is none.")
        if len(self.windows) != len(self.near_windows):
            raise ValueError("expected as many windows with near context as with all of it.")


@dataclass(frozen=True)
class PositionScore(Record):
    """Bits per byte of the targets at positions [start, stop) inside the window."""

    start: int
    stop: int
    bits_per_byte: float

    def check(self) -> None:
        check_count("start", self.start)
        check_count("stop", self.stop, self.start + 1)
        check_loss(self.bits_per_byte)


def mean_loss_at_positions(
    by_position: Sequence[PositionScore], start: int, stop: int
) -> float | None:
    """Return the mean loss in bits per byte at positions [start, stop); None if the runs of
    positions that were scored do not begin and end there.

    >>> runs = [PositionScore(0, 16, 3.0), PositionScore(16, 32, 2.0), PositionScore(32, 64, 1.0)]
    >>> mean_loss_at_positions(runs, 0, 32), mean_loss_at_positions(runs, 0, 48)
    (2.5, None)
    """
    runs = [run for run in by_position if start <= run.start and run.stop <= stop]
    if not runs or (runs[0].start, runs[-1].stop) != (start, stop):
        return None
    total = sum(run.bits_per_byte * (run.stop - run.start) for run in runs)
    return total / (stop - start)


@dataclass(frozen=True)
class Reading(Record):
    """Scores of a trial's weights in another reading than as trained, or why there is none.

    name: "window" or "tuned", see READINGS.
    by_length, far: as those of a TrialResult.
    """

    name: str
    by_length: tuple[LengthScore, ...] = ()
    far: tuple[FarScore, ...] = ()
    cannot: str | None = None

    def check(self) -> None:
        if self.name not in READINGS[1:]:
            raise ValueError(f"expected a reading of {READINGS[1:]}, got {self.name[:100]!r}.")
        check_text_length("the reason", self.cannot or "", MAX_ENTRIES)
        if bool(self.by_length) == (self.cannot is not None):
            raise ValueError("expected scores of a reading, or the reason why there are none.")
        check_rising("lengths", [score.length for score in self.by_length], MAX_ENTRIES)
        check_rising("lengths of far targets", [score.length for score in self.far], MAX_ENTRIES)

    def check_begins_at(self, train_length: int) -> None:
        """Raise ValueError unless the first score is that at the training length."""
        if self.by_length and self.by_length[0].length != train_length:
            raise ValueError(
                f"expected a score of the reading {self.name} at the training length "
                f"{train_length} first, got one at {self.by_length[0].length}"
            )


@dataclass(frozen=True)
class CaseScore(Record):
    """Scores of a model on the held-out sequences of a task's case, see posenc.tasks.scoring, or
    the reason why the encoding cannot run there; `variant` as in posenc.tasks.task.Case."""

    length: int
    variant: str = ""
    exact_match: float | None = None
    token_accuracy: float | None = None
    exact_match_cut: float | None = None
    token_accuracy_cut: float | None = None
    cannot: str | None = None

    def check(self) -> None:
        check_count("length", self.length, 1)
        check_text_length("variant", self.variant, MAX_ENTRIES)
        check_text_length("the reason", self.cannot or "", MAX_ENTRIES)
        fractions = (self.exact_match, self.token_accuracy)
        for fraction in (*fractions, self.exact_match_cut, self.token_accuracy_cut):
            if fraction is not None and not 0 <= fraction <= 1:
                raise ValueError(f"expected a fraction from 0 to 1, got {fraction:g}.")
        if (fractions == (None, None)) == (self.cannot is None):
            raise ValueError("expected a score, or the reason why there is none.")


def check_loss(bits: float | None) -> None:
    """Raise ValueError for a loss outside 0 to 100 bits per byte; None is allowed.
    A uniform guess has 8; 100 is chosen, far above what a trial gives."""
    if bits is not None and not 0 <= bits <= 100:
        raise ValueError(f"expected losses of 0 to 100 bits, got {bits:.3g}.")
