"""The sequences of every task: by hand, by what always holds, and the same from the same seed."""

import math

import numpy as np
import pytest

from posenc.tasks import copy, flip_flop, grids, needles, offsets, recall
from posenc.tasks.registry import TASKS, find_task
from posenc.tasks.task import IGNORED_TARGET, Case

EVERY = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def random():
    return np.random.default_rng(7)


def rows(task, case, count=50):
    generator = random()
    return [tuple(map(list, task.draw_row(generator, case))) for _ in range(count)]


class Fixed:
    """A generator that draws what it is told, in order."""

    def __init__(self, *draws):
        self.draws = [np.array(draw) for draw in draws]

    def _next(self, *arguments, **options):
        return self.draws.pop(0)

    integers = permutation = choice = _next


def test_copy_by_hand():
    tokens, targets = copy.Copy().draw_row(Fixed([4, 0, 4]), Case(3))
    assert tokens.tolist() == [0, 7, 3, 7, 1, 7, 3, 7]
    assert targets.tolist() == [-100, -100, -100, -100, 7, 3, 7, 2]


def test_reverse_by_hand():
    tokens, targets = copy.Reverse().draw_row(Fixed([4, 0, 5]), Case(3))
    assert tokens.tolist() == [0, 7, 3, 8, 1, 8, 3, 7]
    assert targets.tolist() == [-100, -100, -100, -100, 8, 3, 7, 2]


def test_recall_by_hand():
    order = [1, 0]
    tokens, targets = recall.Recall()._draw_row(Fixed([5, 3, 9], [8, 6], [0, 13, 1], order), 2, 3)
    told = [7, 34, 5, 32]
    assert tokens.tolist() == [0, *told, 50, 63, 51, 1, 5, 32, 7]
    assert targets.tolist() == [-100] * 9 + [32, -100, 34]


def test_flip_flop_by_hand():
    kinds = [flip_flop.READ, flip_flop.IGNORE, flip_flop.READ, flip_flop.WRITE, flip_flop.WRITE]
    tokens, targets = flip_flop.FlipFlop().draw_row(Fixed(kinds, [1, 0, 0, 0, 1]), Case(5))
    # write 1, ignore 0, read 1, write 0, read 0
    assert tokens.tolist() == [2, 1, 4, 0, 3, 1, 2, 0, 3]
    assert targets.tolist() == [-100, -100, -100, -100, 1, -100, -100, -100, 0]


def test_offset_by_hand():
    tokens, targets = offsets.Offset().draw_row(Fixed(0, [9, 8, 7, 6, 5]), Case(5))
    assert tokens.tolist() == [0, 12, 11, 10, 9, 8]
    assert targets.tolist() == [-100, -100, -100, -100, 12, 11]


@pytest.mark.parametrize(
    "name, expected",
    [
        (0, [[None] * 3 + [0], [None] * 3 + [4], [None] * 3 + [8], [None] * 3 + [12]]),
        (1, [[None] * 4, [None] * 4, [None, 0, 1, 2], [None, 4, 5, 6]]),
        (2, [[None] * 4, [None] * 4, [None] * 4, [2, 3, None, None]]),
    ],
)
def test_grid_by_hand(name, expected):
    patches = np.arange(16).reshape(4, 4)
    tokens, targets = grids.Grid().draw_row(Fixed(name, patches), Case(4))
    assert tokens.tolist() == [name, *range(3, 19)]
    wanted = [IGNORED_TARGET if cell is None else cell + 3 for row in expected for cell in row]
    assert targets.tolist() == [IGNORED_TARGET, *wanted]


class Scripted:
    """A generator that gives the numbers of a list, one call after the other."""

    def __init__(self, *numbers) -> None:
        self.numbers = list(numbers)

    def integers(self, *bounds, size=None):
        return self.numbers.pop(0)

    permutation = integers


@pytest.mark.parametrize(
    ("numbers", "direction", "start", "end"),
    [
        ([7, [3, 1], [0, 2]], 7, (1, 0), (3, 2)),  # down and to the right
        ([0, [3, 1], [0, 2]], 0, (3, 2), (1, 0)),
        ([2, [0, 1], [3, 1]], 2, (1, 1), (0, 3)),  # up and to the right
        ([3, 2, [0, 3]], 3, (2, 3), (2, 0)),  # to the left, in one row
        ([6, [3, 0], 1], 6, (0, 1), (3, 1)),  # down, in one column
    ],
)
def test_grid_direction_by_hand(numbers, direction, start, end):
    patches = np.arange(16).reshape(4, 4)
    drawn = [patches, *(n if isinstance(n, int) else np.array(n) for n in numbers)]
    tokens, targets = grids.GridDirection().draw_grid(Scripted(*drawn), 4, 4)
    expected = patches + grids.GridDirection.first_symbol
    expected[start], expected[end] = grids.START, grids.END
    assert tokens.tolist() == [grids.ASK, *expected.ravel()]
    assert targets.tolist() == [grids.FIRST_DIRECTION + direction, *[IGNORED_TARGET] * 16]


def test_grid_count_by_hand():
    patches, columns = np.zeros((4, 4), np.int64), np.array([2, 0, 3, 1])
    elsewhere = np.array([0, 5, 11, 2, 3])  # of rows 0, 1 and 3
    numbers = Scripted(patches, 2, 2, columns, 3, elsewhere)
    tokens, targets = grids.GridCount().draw_grid(numbers, 4, 4)
    plain, mark = grids.GridCount.first_symbol, grids.MARK
    picture = [
        [mark, plain, plain, plain],
        [plain, mark, plain, plain],
        [mark, plain, grids.ROW_PATCH, mark],
        [plain, plain, plain, mark],
    ]
    assert tokens.tolist() == [grids.ASK, *np.ravel(picture)]
    assert targets.tolist() == [grids.FIRST_COUNT + 2, *[IGNORED_TARGET] * 16]


def test_places_of_a_grid_by_hand():
    named, *cells = grids.grid_positions(2, 3).tolist()
    assert all(map(math.isnan, named))
    assert cells == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


@EVERY
def test_same_seed_and_step_give_the_same_batch_and_others_do_not(task):
    def made(seed, step):
        return task.train_batch(seed, step, 4, task.train_length)

    first = made(0, 3)
    again = made(0, 3)
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.targets, again.targets)
    for other in (made(1, 3), made(0, 4), task.valid_batch(4, task.train_length)):
        assert not np.array_equal(first.tokens, other.tokens)


@EVERY
def test_tests_are_the_same_for_all_seeds_and_differ_by_case(task):
    cases = task.cases(task.test_lengths)
    assert cases[0] == Case(task.train_length)
    assert len(set(cases)) == len(cases)
    found = {}
    for case in cases[:3]:
        batch = task.test_batch(case, 3, task.train_length)
        assert np.array_equal(batch.tokens, task.test_batch(case, 3, task.train_length).tokens)
        found[batch.tokens.tobytes()] = case
    assert len(found) == 3


@EVERY
def test_batches_have_the_shapes_and_tokens_that_are_promised(task):
    batches = [task.train_batch(0, step, 8, task.train_length) for step in range(3)]
    batches += [task.test_batch(c, 2, task.train_length) for c in task.cases(task.test_lengths)]
    for batch in batches:
        assert batch.tokens.shape == batch.targets.shape
        assert batch.tokens.dtype == batch.targets.dtype == np.int64
        assert batch.tokens.min() >= 0 and batch.tokens.max() < task.vocab_size
        assert ((batch.targets >= 0) | (batch.targets == IGNORED_TARGET)).all()
        assert batch.targets.max() < task.vocab_size
        assert (batch.targets != IGNORED_TARGET).any(1).all()  # every sequence asks something
        assert (batch.positions is None) == (task.num_axes == 1)
    for batch, case in zip(batches[3:], task.cases(task.test_lengths), strict=True):
        assert batch.tokens.shape[1] == task.max_tokens(case)


@EVERY
def test_training_has_all_lengths_and_none_beyond(task):
    if isinstance(task, offsets.Offset):  # each of its sequences holds all shorter ones
        return
    batches = [task.train_batch(0, step, 32, task.train_length) for step in range(40)]
    if task.looks_both_ways:  # asked at the first token
        lengths = {batch.tokens.shape[1] - 1 for batch in batches}
    else:
        lengths = {
            int((row != IGNORED_TARGET).nonzero()[0].max())
            for batch in batches
            for row in batch.targets
        }
    longest = task.max_tokens(Case(task.train_length)) - 1
    assert max(lengths) == longest
    assert min(lengths) < longest / 2 and len(lengths) > 5


@pytest.mark.parametrize("task", [copy.Copy(), copy.CopyDistinct(), copy.Reverse()])
def test_an_answer_is_what_was_read(task):
    backwards = isinstance(task, copy.Reverse)
    for tokens, targets in rows(task, Case(9)):
        x = tokens[1:10]
        assert [t for t in targets if t != IGNORED_TARGET] == [
            *(x[::-1] if backwards else x),
            copy.END,
        ]
    seen = [len(set(tokens[1:10])) for tokens, _ in rows(task, Case(9))]
    assert (min(seen) == 9) == isinstance(task, copy.CopyDistinct)


def test_recalled_values_are_those_told():
    for case, pairs in ((Case(5), 8), (Case(5, "16 pairs"), 16)):
        for tokens, targets in rows(recall.Recall(), case):
            told = dict(zip(tokens[1 : 2 * pairs : 2], tokens[2 : 2 * pairs + 1 : 2], strict=True))
            asked = [i for i, t in enumerate(targets) if t != IGNORED_TARGET]
            assert len(told) == pairs
            assert {tokens[i]: targets[i] for i in asked} == told
            gap = tokens[2 * pairs + 1 : 2 * pairs + 6]
            assert min(gap) >= recall.FIRST_FILLER and tokens[2 * pairs + 6] == recall.SEPARATOR


def parts(tokens, targets):
    """Text, question and answer of a sequence; the facts of the text, and where each begins."""
    text = tokens[1 : tokens.index(needles.SEPARATOR)]
    answer = [t for t in targets if t != IGNORED_TARGET]
    asked = tokens[len(text) + 2 : len(tokens) - len(answer) + 1]
    at = [i for i, token in enumerate(text) if token == needles.FACT]
    return text, asked, answer, [tuple(text[i + 1 : i + 3]) for i in at], at


@pytest.mark.parametrize("case", [Case(64), Case(64, "at the start"), Case(64, "at the end")])
def test_a_needle_is_asked_for_by_a_name_that_is_not_in_the_text(case):
    for row in rows(needles.NeedleByMeaning(), case):
        text, (asked,), answer, facts, at = parts(*row)
        assert len(text) == 64 and asked not in text and len(facts) == 8
        assert answer == [dict(facts)[asked - needles.NUM_SYMBOLS]]
        place = at[[value for _, value in facts].index(answer[0])]
        assert {"": True, "at the start": place < 24, "at the end": place > 38}[case.variant]


def test_names_that_stand_for_a_number_are_those_of_its_chain():
    for row in rows(needles.Variables(), Case(64)):
        text, asked, answer, facts, _ = parts(*row)
        assert len(text) == 64 and len(facts) == 8
        chain = asked
        for name, said in facts:
            chain = [*chain, name] if said in chain else chain
        assert chain[1:] == answer and len(answer) == 4


def test_common_words_are_the_most_frequent_ones():
    for row in rows(needles.CommonWords(), Case(60)):
        text, asked, answer, _, _ = parts(*row)
        counts = sorted(set(text), key=lambda word: -text.count(word))
        assert len(text) == 60 and asked == [] and answer == sorted(counts[:3])
        assert text.count(counts[2]) == 10 > text.count(counts[3])


def test_variants_of_one_length_are_drawn_apart():
    task = find_task("recall")
    keys = [
        task.test_batch(case, 1, 16).tokens[0, 1:17:2].tolist()
        for case in (Case(16), Case(16, "16 pairs"))
    ]
    assert keys[0] != keys[1]


def test_flip_flop_reads_the_last_write_in_the_shares_promised():
    task = flip_flop.FlipFlop()
    for variant, share in (("", 0.8), ("98 % ignored", 0.98), ("10 % ignored", 0.1)):
        ignored = 0
        for tokens, targets in rows(task, Case(64, variant), 100):
            bit = None
            for i in range(0, len(tokens), 2):
                if tokens[i] == flip_flop.WRITE:
                    bit = tokens[i + 1]
                assert targets[i] == (bit if tokens[i] == flip_flop.READ else IGNORED_TARGET)
            assert tokens[0] == flip_flop.WRITE and tokens[-1] == flip_flop.READ
            ignored += tokens[::2].count(flip_flop.IGNORE)
        assert ignored / 6400 == pytest.approx(share * 62 / 64, abs=0.02)


def test_far_tests_of_offset_ask_only_beyond_training():
    task = offsets.Offset()
    near = task.test_batch(Case(64), 2, 64).targets
    far = task.test_batch(Case(128), 2, 64).targets
    assert (near[:, 14:] != IGNORED_TARGET).all()
    assert (far[:, :65] == IGNORED_TARGET).all() and (far[:, 65:] != IGNORED_TARGET).all()


def test_far_tests_of_grid_ask_only_outside_of_training():
    task = grids.Grid()
    batch = task.test_batch(Case(12), 20, 8)
    asked = (batch.targets != IGNORED_TARGET).any(0)
    inside = (batch.positions < 8).all(1)
    assert not asked[inside].any()
    assert asked[~inside].any()
    assert (task.test_batch(Case(8), 20, 8).targets != IGNORED_TARGET).any()


@EVERY
def test_lengths_that_cannot_be_made_are_refused(task):
    task.check_lengths(task.train_length, task.test_lengths)
    if task.min_train_length:
        with pytest.raises(ValueError, match=rf"--train-length: the task {task.name} takes"):
            task.check_lengths(task.min_train_length - 1, (task.train_length,))
    with pytest.raises(ValueError, match=rf"--test-lengths: the task {task.name} is tested at"):
        task.check_lengths(task.train_length, (task.train_length - 1,))


def test_more_different_symbols_than_there_are_are_refused():
    with pytest.raises(ValueError, match=r"copy_512 takes 2 to 512 symbols, got 513"):
        find_task("copy_512").check_lengths(20, (20, 513))


def test_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match=r"Unknown task 'flipflop'\. Did you mean 'flip_flop'"):
        find_task("flipflop")
