"""What the probes share: pairs of channels by what turned, errors in words, and what is a server's
refusal."""

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.runtimes.ask.probes.other_runtimes import PROBES


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of the two files that probes share, which are imported from their own folder."""
    monkeypatch.syspath_prepend(PROBES)
    names = ("probing", "server_probing")
    yield {key: value for name in names for key, value in vars(import_module(name)).items()}
    for name in names:
        del sys.modules[name]


def turned(width: int, pairs: list[tuple[int, int]]) -> list[list[float]]:
    """What becomes of unit vectors of a head whose pairs turn, each by another angle."""
    rows = [[float(i == j) for j in range(width)] for i in range(width)]
    for i, (first, second) in enumerate(pairs):
        cos, sin = math.cos(0.1 + i), math.sin(0.1 + i)
        rows[first][first] = rows[second][second] = cos
        rows[first][second], rows[second][first] = sin, -sin
    return rows


HALVES, ADJACENT = [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("width", "turning", "rotated", "pairs"),
    [
        (8, HALVES, 8, HALVES),
        (8, ADJACENT, 8, ADJACENT),
        (8, HALVES[:2], 8, HALVES),
        (8, HALVES[1:], 8, HALVES),
        (8, ADJACENT[:1], 8, ADJACENT),
        (8, [(0, 2), (1, 3)], 4, [(0, 2), (1, 3)]),
        (8, HALVES[:1], 2, HALVES),
        (4, [], 4, [(0, 2), (1, 3)]),
    ],
    ids=["halves", "adjacent", "slow ones", "a still first", "one", "a part", "more", "none"],
)
def test_pairs_are_known_by_what_turns(shared, width, turning, rotated, pairs):
    assert shared["pairs_of_channels"](turned(width, turning), rotated) == pairs


@pytest.mark.parametrize(
    ("pairs", "words"),
    [([(0, 4), (0, 5)], "turns with 2 others"), ([(0, 4), (1, 4)], "has no partner")],
)
def test_channels_that_are_no_pairs_are_refused(shared, pairs, words):
    rows = turned(8, [])
    for first, second in pairs:
        rows[first][second] = 0.5
    with pytest.raises(ValueError, match=words):
        shared["pairs_of_channels"](rows, 8)


def test_equal_rotations_of_layers_are_one(shared):
    one, other = {"inv_freq": [1.0]}, {"inv_freq": [0.5]}
    joined = shared["join_equal_rotations"]({2: ("c", one), 0: ("a", one), 1: ("b", other)})
    assert [(row["module"], row["layers"], row["inv_freq"]) for row in joined] == [
        ("a", [0, 2], [1.0]),
        ("b", [1], [0.5]),
    ]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_an_error_of_the_memory_is_nobodys_answer(shared, error):
    def refuse(case: object) -> None:
        raise ValueError(shared["error_in_one_line"](error))

    (said,) = shared["answer_within_memory"](refuse, {}).values()
    assert said == "it needs more memory than a probe is given"


@pytest.mark.parametrize(
    ("error", "key"),
    [
        (ValueError("rope_scaling: no such type"), "refuses"),
        (ImportError("no module of the rope kernel"), "unmeasured"),
        (ValueError("no card"), "unmeasured"),
    ],
)
def test_a_missing_kernel_is_no_refusal_of_a_server(shared, error, key):
    class Planted(shared["Server"]):
        def longest_admitted(self, config):
            return 64

        def settings_for(self, config, length):
            return None

        def build_model(self, settings):
            raise error

    assert key in Planted().answer_case({"config": {}, "lengths": [16]})


class LikeCohere2:
    """An attention that has a rotary module and calls it in some layers only."""

    def __init__(self, v1: bool, sliding_window: int | None) -> None:
        self.v1, self.sliding_window = v1, sliding_window
        self.rotary_emb = lambda positions: positions

    def forward(self, positions: int) -> int:
        if self.v1 or self.sliding_window:
            positions = self.rotary_emb(positions)
        return positions


class WithTwoWays(LikeCohere2):
    """An attention that rotates in both branches, and on a condition that is not its own."""

    def forward(self, positions: int) -> int:
        if self.v1:
            return self.rotary_emb(positions)
        elif self.sliding_window:
            return self.rotary_emb(positions)
        else:
            positions = self.rotary_emb(positions)
        if positions > 3:
            return self.rotary_emb(positions)
        return positions


@pytest.mark.parametrize(
    ("attention", "skips"),
    [
        (LikeCohere2(False, None), True),
        (LikeCohere2(True, None), False),
        (LikeCohere2(False, 64), False),
        (WithTwoWays(False, None), False),
    ],
)
def test_a_layer_whose_code_does_not_call_its_rotary_module_is_unrotated(attention, skips, shared):
    assert shared["skips_rotation"](attention, "forward", "rotary_emb") is skips
    assert not shared["skips_rotation"](attention, "missing", "rotary_emb")
    assert not shared["skips_rotation"](attention, "forward", "rope")
