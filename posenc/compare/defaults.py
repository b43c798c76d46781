"""What a comparison takes that no option chooses: encodings, sizes, lengths, budgets of training.

Numbers that the help shows, such as the learning rate, stand in `posenc.compare.options`; steps
and lengths of tasks in `posenc.tasks`.
"""

from typing import Any, NamedTuple

DEFAULT_ENCODINGS = ("rope", "rnope_swa", "alibi", "t5")
"""The encodings of a comparison that names none; hybrids by layer only where the layers allow.
`learned` is not among them, as its table ends where the longer tests begin, and `nope` stands in
`rnope_swa`, as models have it."""
DEFAULT_BIDIRECTIONAL = ("sinusoidal", "learned", "rope", "alibi", "t5", "deberta")
"""The same for objectives without a causal mask, where NoPE is blind to order."""
DECODER_SIZES = {"width": 64, "layers": 4, "heads": 4}
"""Sizes of the decoder that is trained on text, or on a task: those of the published board."""
TEXT_SIZES = {"train_length": 128, "batch": 32}
"""Bytes of a training window, and windows of a step, on text."""
TEST_LENGTH_FACTORS = (1, 2, 4, 8)
"""Lengths of the test windows on text, in multiples of the training length."""
MIN_TUNE_STEPS, TUNE_FRACTION = 100, 0.05
"""Steps of a tuning at the longest length: at least so many, and this fraction of those of
training. Position Interpolation takes 1,000 of a pretraining of hundreds of thousands
(arXiv:2306.15595)."""
TUNE_BATCH = 2
"""Windows of the longest length in each step of that tuning: half of posenc extend's default, so
that a study's tuning takes about a third of the time of its training."""


class Budget(NamedTuple):
    """How much a comparison trains: number of seeds, and steps of a trial on text; for a suite also
    its tasks, "text" first, and whether learning rates are chosen first (--search-lr)."""

    seeds: int
    steps: int
    tasks: tuple[str, ...] = ()
    search_lr: bool = False

    def __str__(self) -> str:
        seeds_and_steps = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}, {self.steps} steps"
        tasks_clause = f" on text, {', '.join(self.tasks[1:])}" if self.tasks else ""
        return f"{seeds_and_steps}{tasks_clause}{', --search-lr' if self.search_lr else ''}"


NUM_PAIR_SEEDS = 4
"""Seeds of the standard budget for two encodings: their spread is not pooled with that of others.
Four seeds of two encodings cost less than two seeds of six."""
BUDGETS = {"quick": Budget(1, 250), "standard": Budget(2, 250), "thorough": Budget(3, 600)}
"""250 steps: in each of three seeds they ordered every pair of nope, sinusoidal, learned, rope,
alibi and t5 as 500 steps did, where those agreed in all seeds. 200 against 400 and 300 against 600
agreed too. That was in models of width 128, with usual settings, one rate for all and losses at the
training length only (three seeds, recipes 2 and 3, results/LOG.md); today's tuned settings were not
measured so."""

_QUICK_TASKS = ("text", "copy", "recall", "offset")
ALL_TASKS = (*_QUICK_TASKS, "flip_flop", "reverse", "copy_512")
"""Text and the sequence tasks, the quick ones first."""
SUITES = {
    "quick": Budget(1, 600, _QUICK_TASKS),
    "standard": Budget(2, 600, ALL_TASKS),
    "thorough": Budget(3, 600, ALL_TASKS, search_lr=True),
}
"""Each has all trials of the one before, so a larger budget reuses its results. Trials with checked
learning rates are others."""
SUITE_SIZES: dict[str, Any] = {"width": 64, "layers": 3, "heads": 4}
"""Sizes of the decoder of a suite: enough for the tasks, in three quarters of the time."""
