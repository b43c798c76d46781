"""Read a grid of patches: find the patch at an offset, say where a patch lies, or count patches."""

import math
from abc import abstractmethod
from dataclasses import replace

import numpy as np

from posenc.tasks.task import IGNORED_TARGET, Batch, Case, Row, Shortcut, Task, stack_rows

OFFSETS = ((0, 3), (2, 1), (3, -2))
"""Offsets of Grid, (rows up, columns left), named by tokens 0, 1 and 2; all lead backwards in
reading order."""
NUM_SYMBOLS = 32
"""Number of different patches; chosen, not derived."""
NOWHERE = (math.nan, math.nan)
"""Position of the first token, which asks and is not on the grid."""
ASK, START, END = 0, 1, 2
"""Tokens of GridDirection: the one that asks, and the patches at both ends of the arrow."""
DIRECTIONS = ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1))
"""Directions of an arrow, (sign of rows down, sign of columns right)."""
FIRST_DIRECTION = 3
"""Token of the first direction, an answer; then come the others, and then the plain patches."""
MARK = 1
"""Token of GridCount's marked patches; 0 asks."""
ROW_PATCH = 2
"""Token of the patch in whose row marks are counted."""
FIRST_COUNT = 3
"""Token of the count 0, an answer; then come the other counts, and then the plain patches."""
MAX_COUNT = 3
"""Most marks in the row that is asked for: the smallest grid has three more patches in a row."""
MAX_ELSEWHERE = 6
"""Most marks in the other rows; chosen so that all marks together say little of one row."""


class GridTask(Task):
    """Base class of tasks whose sequences are one token without a place, and then the patches of a
    grid row by row; a subclass defines `draw_grid`.

    A length, also `train_length`, is the side of a square grid: its number of rows and of columns.
    Training grids have 4 x 4 to 8 x 8 patches; height and width are drawn for each step. Test grids
    are square.
    """

    length_unit = "rows and columns"
    metric = "token accuracy"
    num_axes = 2
    min_length = 4
    min_train_length = 4
    train_length = 8
    test_lengths = (8, 12, 16, 24, 32)
    steps = 1500
    batch = 32

    @abstractmethod
    def draw_grid(self, random: np.random.Generator, height: int, width: int) -> Row:
        """Draw the first token and the patches of a grid, row by row: (tokens, targets)."""

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        return self.draw_grid(random, case.length, case.length)

    def max_tokens(self, case: Case) -> int:
        return case.length**2 + 1

    def encoding_train_length(self, train_length: int) -> int:
        """Return the number of patches of the largest training grid: train_length rows and columns.
        The first token has no position and does not count."""
        return train_length**2

    def test_batch(self, case: Case, batch_size: int, train_length: int) -> Batch:
        batch = super().test_batch(case, batch_size, train_length)
        return replace(batch, positions=grid_positions(case.length, case.length))

    def _draw_training_batch(
        self, random: np.random.Generator, batch_size: int, train_length: int
    ) -> Batch:
        height, width = random.integers(self.min_length, train_length + 1, size=2)
        rows = [self.draw_grid(random, height, width) for _ in range(batch_size)]
        return replace(stack_rows(rows, len(rows[0][0])), positions=grid_positions(height, width))


class Grid(GridTask):
    """Read the name of an offset, then the patches of a grid row by row. After each patch predict
    the patch at that offset from it, if the grid has one.

    In tests patches within the first 8 rows and columns, those of training, are not scored.
    """

    name = "grid"
    title = "find the patch at an offset on a grid"
    vocab_size = len(OFFSETS) + NUM_SYMBOLS

    def tokens_of_training_length(self, case: Case, train_length: int) -> np.ndarray:
        # Written so that NOWHERE, of which every comparison is False, counts as within.
        return np.all(~(grid_positions(case.length, case.length) >= train_length), axis=1)

    def draw_grid(self, random: np.random.Generator, height: int, width: int) -> Row:
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


class GridDirection(GridTask):
    """Read a picture as a Vision Transformer does, each token all others, and say in which of eight
    directions the patch END lies from the patch START. The answer is asked of the first token.
    """

    name = "grid_direction"
    title = "say in which direction one patch of a picture lies from another"
    looks_both_ways = True
    test_lengths = (8, 16, 32)
    steps = 600
    first_symbol = FIRST_DIRECTION + len(DIRECTIONS)
    vocab_size = first_symbol + NUM_SYMBOLS

    def draw_grid(self, random: np.random.Generator, height: int, width: int) -> Row:
        patches = self.first_symbol + random.integers(0, NUM_SYMBOLS, size=(height, width))
        direction = int(random.integers(len(DIRECTIONS)))
        down, right = DIRECTIONS[direction]
        start_row, end_row = _two_along_an_axis(random, height, down)
        start_column, end_column = _two_along_an_axis(random, width, right)
        patches[start_row, start_column] = START
        patches[end_row, end_column] = END
        return _asked_at_first_token(patches, FIRST_DIRECTION + direction)


class GridCount(GridTask):
    """Read a picture as a Vision Transformer does, each token all others, and say how many patches
    MARK are in the row of the patch ROW_PATCH: 0 to 3, with 0 to 6 more in other rows. The answer
    is asked of the first token.
    """

    name = "grid_count"
    title = "count the marked patches in one row of a picture"
    looks_both_ways = True
    test_lengths = (8, 16, 32)
    steps = 1000
    first_symbol = FIRST_COUNT + MAX_COUNT + 1
    vocab_size = first_symbol + NUM_SYMBOLS

    def shortcuts(self) -> dict[str, Shortcut]:
        return {"counting in all rows": _count_all_marks}

    def draw_grid(self, random: np.random.Generator, height: int, width: int) -> Row:
        patches = self.first_symbol + random.integers(0, NUM_SYMBOLS, size=(height, width))
        row = int(random.integers(height))
        count = int(random.integers(MAX_COUNT + 1))
        columns = random.permutation(width)
        patches[row, columns[0]] = ROW_PATCH
        patches[row, columns[1 : count + 1]] = MARK
        num_elsewhere = int(random.integers(MAX_ELSEWHERE + 1))
        cells_elsewhere = random.permutation((height - 1) * width)[:num_elsewhere]
        rows_elsewhere = cells_elsewhere // width
        rows_elsewhere += rows_elsewhere >= row
        patches[rows_elsewhere, cells_elsewhere % width] = MARK
        return _asked_at_first_token(patches, FIRST_COUNT + count)


def _two_along_an_axis(random: np.random.Generator, size: int, sign: int) -> tuple[int, int]:
    """Draw two rows, or two columns, out of `size`: one and the same for sign 0, the second after
    the first for sign 1, before it for -1."""
    if sign == 0:
        place = int(random.integers(size))
        return place, place
    low, high = sorted(random.permutation(size)[:2].tolist())
    return (low, high) if sign > 0 else (high, low)


def _asked_at_first_token(patches: np.ndarray, answer: int) -> Row:
    """Return a picture's tokens after ASK, and targets: the answer at ASK, nothing elsewhere."""
    tokens = np.array([ASK, *patches.ravel()])
    targets = np.full(len(tokens), IGNORED_TARGET, np.int64)
    targets[0] = answer
    return tokens, targets


def _count_all_marks(tokens: np.ndarray) -> np.ndarray:
    """Guess the likeliest count of one row from that of all rows, (1,): half of them."""
    num_marks = int((tokens == MARK).sum())
    return np.array([FIRST_COUNT + min(MAX_COUNT, num_marks // 2)])


def grid_positions(height: int, width: int) -> np.ndarray:
    """Return (row, column) of each token, (height * width + 1, 2): NOWHERE for the first token,
    then those of the patches row by row."""
    cell_indices = np.arange(height * width)
    return np.concatenate(
        [[NOWHERE], np.stack([cell_indices // width, cell_indices % width], axis=1)]
    )
