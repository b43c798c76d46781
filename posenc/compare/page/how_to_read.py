"""What the columns of the tables of a study mean, in words for its page."""

from posenc.compare.trial.config import CONSTANT, TrialConfig

HOW_TO_READ_TEXT = (
    "Bits per byte is the loss on held-out text; lower is better. Two columns are judged: the loss "
    "at the training length, and that of far bytes, the last ones of each longest window. Best: "
    "significantly better than all others there, by more than 0.02 bits. Tied: no encoding is so. "
    "Worse: at least one is. An encoding is judged in its simplest reading that holds: as trained, "
    "in a window of the training length, or after a short tuning; its other rows have no verdict. "
    "Means over whole windows mix near and far bytes and are not judged."
)
_HOW_TO_READ_ROWS = (
    "Far bytes are those at the end of the longest windows, as many as a window of training has; "
    "their loss is in the table of the text. Near context: the loss of the same bytes with at most "
    "that many bytes of context. Far context saves: the difference of these losses; ± is a 95 % "
    "bootstrap interval over the windows of this text. Context used: more "
    "bytes than those with which a longer window is better for certain, by more than 0.02 bits; at "
    "most those over which no longer one saves so much. Only tested lengths tell. In a window: the "
    "same weights with attention limited to the last bytes, without training. Tuned: after a short "
    "training at the longest length, by the code of posenc extend. Costs: training steps against "
    "those of the encoding in the heading, taken in turns in one process before the trials where "
    "that was possible; where a range contains 1, the two are not told apart. Equal time: "
    "validation loss when the fastest encoding ends, read from each curve, with the range over "
    "seeds and costs; "
)
NOTE_ON_INTERVALS = (
    "± over seeds is half of an interval that holds for all pairs together, near and far: the "
    "residual spread of a least-squares fit of encodings and seeds, pooled over all encodings and "
    "with what earlier studies had, and the studentized range; those tied for the best are judged "
    "again without the others. ± over windows is a paired bootstrap over the windows of this text. "
    "Significant means by seeds."
)
HOW_TO_READ_TASKS = (
    "In small letters: how many trials learned the task. A trial has learned its task if it says "
    "at least 90 % of the held-out sequences of the longest trained length without a mistake. The "
    "score of a task is the mean over all longer tests, of every trial, learned or not. The rank "
    "is the mean over all tasks and seeds, among the encodings that run all tasks; trials that did "
    "not learn share the last ranks. In brackets are the best and the worst place if any one task "
    "is left out. Colours are tiers: an encoding of the first is significantly worse than none, "
    "one of the next only than those before it. Where the seeds decide nothing there is no colour."
)


def how_to_read_rows(trial: TrialConfig) -> str:
    """Return what the columns of the table of rows mean, in words. trial: any of the study.

    The loss at equal time of an encoding that is not the fastest is read before the end of its
    steps. Only where its rate stays constant it is the loss of a training of so many steps; then a
    warm-up that is a part of the steps is still longer than in that training.
    """
    if trial.schedule != CONSTANT:
        return f"{_HOW_TO_READ_ROWS}a schedule for so many steps would do better."
    warmup_is_a_part = 0 < trial.warmup < 1
    same = "about the same, as its warm-up is shorter" if warmup_is_a_part else "the same"
    return f"{_HOW_TO_READ_ROWS}at a constant rate a training of so many steps gives {same}."
