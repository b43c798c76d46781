"""The encodings by kind: what takes seconds is run for a few kinds by `make test`, for one encoding
of each kind, or of half of them, by `make test-all`, and for all by `make nightly`."""

import functools
from collections.abc import Hashable
from typing import Any

import pytest

from posenc import create, names
from posenc.testing.harness import (
    SHAPE,
    as_tokens,
    possible_length,
    random_embeddings,
    random_qkv,
    successive_positions,
)


def kind(name: str) -> Hashable:
    """Return what decides the code that runs: the places of an encoding, whether positions have
    axes, whether tokens have a state, the class of the term."""
    encoding = create(name, SHAPE).double()
    claims, first = encoding.claims, encoding.for_layer(0)
    positions = successive_positions(encoding, possible_length(encoding, 5))
    x, (q, _, _) = random_embeddings(len(positions)), random_qkv(len(positions))
    state = first.state(x, positions)
    term = first.term(*as_tokens(q, q, positions, positions, state, state, claims.num_axes))
    return claims.places, claims.num_axes > 1, state is None, type(term)


@functools.cache
def one_of_each_kind(turn: int = 0, num_turns: int = 1) -> list[Any]:
    """Every name as a parameter of a test; all but the first of each kind are nightly.

    turn, num_turns: tests that each compile or export an encoding for seconds share the kinds out
    among them: one of `num_turns` tests takes every so many of them, beginning with number `turn`,
    and leaves the other kinds to `make nightly`, too.
    """
    seen: set[Hashable] = set()
    found = []
    for name in names():
        its_kind = kind(name)
        is_new = its_kind not in seen
        has_turn = len(seen) % num_turns == turn
        seen.add(its_kind)
        found.append(name if is_new and has_turn else pytest.param(name, marks=pytest.mark.nightly))
    return found
