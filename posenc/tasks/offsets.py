"""Find the symbol at a given distance before each symbol, or the patch at an offset on a grid."""

import math
from dataclasses import replace

import numpy as np

from posenc.tasks.task import IGNORED_TARGET, Batch, Case, Row, Task, stack_rows

DISTANCES = (3, 7, 13)
"""Distances of Offset, named by tokens 0, 1 and 2."""
OFFSETS = ((0, 3), (2, 1), (3, -2))
"""Offsets of Grid, (rows up, columns left), named by tokens 0, 1 and 2; all lead backwards in
reading order."""
NUM_SYMBOLS = 32
"""Number of different symbols, and of different patches; chosen, not derived."""
NOWHERE = (math.nan, math.nan)
"""Position of the token that names the offset, which is not on the grid."""


class Offset(Task):
    """Read a token that names a distance, then symbols. After each symbol predict the symbol that
    many places before it.

    All training sequences have the full length, because in a causal model each contains all shorter
    ones. In tests only symbols after the training length are scored.
    """

    name = "offset"
    title = f"say the symbol {', '.join(map(str, DISTANCES[:-1]))} or {DISTANCES[-1]} places before"
    metric = "token accuracy"
    vocab_size = len(DISTANCES) + NUM_SYMBOLS
    min_train_length = DISTANCES[-1] + 1
    train_length = 64
    test_lengths = (64, 128, 256, 512, 1024)
    steps = 1000
    batch = 32

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        distance_token = int(random.integers(len(DISTANCES)))
        distance = DISTANCES[distance_token]
        x = len(DISTANCES) + random.integers(0, NUM_SYMBOLS, size=case.length)
        targets = np.full(case.length + 1, IGNORED_TARGET, np.int64)
        targets[1 + distance :] = x[:-distance]
        return np.array([distance_token, *x]), targets

    def draw_train_row(self, random: np.random.Generator, train_length: int) -> Row:
        return self.draw_row(random, Case(train_length))

    def max_tokens(self, case: Case) -> int:
        return case.length + 1

    def tokens_of_training_length(self, case: Case, train_length: int) -> slice:
        return slice(train_length + 1)


class Grid(Task):
    """Read the name of an offset, then the patches of a grid row by row. After each patch predict
    the patch at that offset from it, if the grid has one.

    A length, also `train_length`, is the side of a square grid: its number of rows and of columns.
    Training grids have 4 x 4 to 8 x 8 patches; height and width are drawn for each step. Test grids
    are square, and patches within the first 8 rows and columns are not scored.
    """

    name = "grid"
    title = "find the patch at an offset on a grid"
    length_unit = "rows and columns"
    metric = "token accuracy"
    num_axes = 2
    vocab_size = len(OFFSETS) + NUM_SYMBOLS
    min_length = 4
    min_train_length = 4
    train_length = 8
    test_lengths = (8, 12, 16, 24, 32)
    steps = 1500
    batch = 32

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        return self._draw_row(random, case.length, case.length)

    def max_tokens(self, case: Case) -> int:
        return case.length**2 + 1

    def encoding_train_length(self, train_length: int) -> int:
        """Return the number of patches of the largest training grid: train_length rows and columns.
        The token that names the offset has no position and does not count."""
        return train_length**2

    def test_batch(self, case: Case, batch_size: int, train_length: int) -> Batch:
        batch = super().test_batch(case, batch_size, train_length)
        return replace(batch, positions=grid_positions(case.length, case.length))

    def tokens_of_training_length(self, case: Case, train_length: int) -> np.ndarray:
        # Written so that NOWHERE, of which every comparison is False, counts as within.
        return np.all(~(grid_positions(case.length, case.length) >= train_length), axis=1)

    def _draw_training_batch(
        self, random: np.random.Generator, batch_size: int, train_length: int
    ) -> Batch:
        height, width = random.integers(self.min_length, train_length + 1, size=2)
        rows = [self._draw_row(random, height, width) for _ in range(batch_size)]
        return replace(stack_rows(rows, len(rows[0][0])), positions=grid_positions(height, width))

    def _draw_row(self, random: np.random.Generator, height: int, width: int) -> Row:
        """Draw the name of an offset and the patches of a grid, row by row: (tokens, targets). The
        target of a patch is the patch at the offset, if that is on the grid."""
        offset_token = int(random.integers(len(OFFSETS)))
        patches = len(OFFSETS) + random.integers(0, NUM_SYMBOLS, size=(height, width))
        rows_up, columns_left = OFFSETS[offset_token]
        targets = np.full((height, width), IGNORED_TARGET, np.int64)
        # Columns whose patch at the offset is on the grid; `columns_left` may be negative.
        first_column = max(columns_left, 0)
        stop_column = width + min(columns_left, 0)
        targets[rows_up:, first_column:stop_column] = patches[
            : height - rows_up, first_column - columns_left : stop_column - columns_left
        ]
        return np.array([offset_token, *patches.ravel()]), np.array(
            [IGNORED_TARGET, *targets.ravel()]
        )


def grid_positions(height: int, width: int) -> np.ndarray:
    """Return (row, column) of each token, (height * width + 1, 2): NOWHERE for the name of the
    offset, then those of the patches row by row."""
    cell_indices = np.arange(height * width)
    return np.concatenate(
        [[NOWHERE], np.stack([cell_indices // width, cell_indices % width], axis=1)]
    )
