"""A few random attentions in every run of the tests; python -m tests.fuzz.attention takes more."""

import itertools

import pytest
import torch

from posenc.attend import problem_builder
from posenc.attend.ways import blocks, key_rows, reference, sdpa
from posenc.encodings.base import distance_bias
from posenc.encodings.numerics import caches
from posenc.encodings.scores import alibi
from posenc.masks import kinds
from tests.fuzz import attention, formulas


@pytest.mark.parametrize(
    ("count", "seed"),
    [(40, 0), *(pytest.param(100, s, marks=pytest.mark.slow) for s in (0, 10_000))],
)
def test_random_attentions_equal_the_formula(count, seed, capsys):
    assert attention.main(count, seed) == []
    counts = capsys.readouterr().out
    assert "'agree': " in counts and "'wrong'" not in counts
    assert all(region in counts for region in attention.REGIONS)


def drawn(count, where):
    """The first `count` cases for which `where` holds."""
    cases = map(attention.draw, itertools.count())
    return list(itertools.islice((case for case in cases if where(case)), count))


def wrongs(cases):
    tries = [attention.tried(case) for case in cases]
    return [found for verdict, found in tries if verdict == "wrong"]


def in_region(*regions):
    return lambda case: set(regions) <= set(case.regions())


@pytest.mark.parametrize("region", attention.REGIONS)
def test_every_region_is_drawn_and_agrees(region):
    cases = drawn(4, in_region(region))
    assert not wrongs(cases)


def test_a_kernel_that_is_slightly_off_is_found(monkeypatch):
    def off(problem):
        out, lse = reference.run(problem)
        return out * 1.01, lse

    monkeypatch.setattr(blocks, "run", off)
    assert wrongs(drawn(12, lambda case: case.impl == "blocks"))


def test_a_nan_is_found(monkeypatch):
    def nothing(problem):
        out, lse = reference.run(problem)
        return out * float("nan"), lse

    monkeypatch.setattr(blocks, "run", nothing)
    assert wrongs(drawn(12, lambda case: case.impl == "blocks"))


def by_key_rows(case):
    """True if attention with ALiBi takes one row of bias for each block of queries."""
    plain = case.impl == "auto" and not (case.lse or case.sinks)
    return plain and str(case.mask) == "causal" and case.layout in (*attention.FAR, "scattered")


def test_products_of_absolute_positions_are_found(monkeypatch):
    absolute = lambda q, k: (q.double(), k.double())  # noqa: E731
    monkeypatch.setattr(alibi, "subtract_first_key", absolute)
    monkeypatch.setattr(key_rows, "why_cannot_run", lambda problem: None)
    monkeypatch.setattr(key_rows, "_block_size", lambda row: 128)
    cases = drawn(
        6, lambda c: by_key_rows(c) and c.name == "alibi" and not c.gradients and c.q_len > 8
    )
    assert wrongs(cases)


def test_distances_of_rounded_positions_are_found(monkeypatch):
    def rounded(q, k):
        return q.float()[..., :, None] - k.float()[..., None, :]

    monkeypatch.setattr(distance_bias, "distances", rounded)
    assert wrongs(drawn(12, lambda case: case.name == "kerple" and case.layout in attention.FAR))


def test_gradients_of_slopes_from_gradients_per_key_are_found(monkeypatch):
    own = alibi.ALiBi.term

    def query_and_key_bias(self, q, k):
        term = own(self, q, k)
        term.query_and_key_bias = lambda: self._query_and_key_bias(
            q.positions + 10**6, k.positions + 10**6
        )
        return term

    monkeypatch.setattr(alibi.ALiBi, "term", query_and_key_bias)
    monkeypatch.setattr(alibi, "subtract_first_key", lambda q, k: (q.double(), k.double()))
    monkeypatch.setattr(key_rows, "why_cannot_run", lambda problem: None)
    monkeypatch.setattr(key_rows, "_block_size", lambda row: 128)
    cases = drawn(3, lambda c: by_key_rows(c) and c.long and c.name == "alibi:learned=true")
    assert wrongs(cases)


def test_tables_of_weights_before_a_step_are_found(monkeypatch):
    monkeypatch.setattr(caches, "_same_tensors", lambda before, now: True)
    names = ("t5", "kerple", "deberta", "transformer_xl")
    cases = drawn(24, lambda c: c.stepped and c.name in names and c.needs == "nothing")
    assert wrongs(cases)


def test_a_mask_that_is_off_by_one_is_found(monkeypatch):
    def near(window_size, pairs):
        return (pairs.q_position - pairs.kv_position).abs() <= window_size

    monkeypatch.setattr(kinds, "_key_is_within_window", near)
    cases = drawn(40, lambda c: c.mask is not None and "window" in c.mask.leaves)
    assert wrongs(cases)


def test_documents_that_see_one_another_are_found(monkeypatch):
    monkeypatch.setattr(problem_builder, "check_documents", lambda mask: None)

    def positional(case):
        tree = case.mask
        only = tree is not None and set(tree.leaves) <= set(formulas.POSITIONAL)
        return only and case.layout == "packed" and min(case.q_len, case.kv_len) > 6

    assert any("see one another" in found for found in wrongs(drawn(8, positional)))


def test_a_missing_second_derivative_is_found(monkeypatch):
    monkeypatch.setattr(sdpa, "make_twice_differentiable", lambda problem, out: out)
    cases = drawn(12, lambda c: c.twice and c.name in ("nope", "rope") and c.impl == "auto")
    assert wrongs(cases)


def test_a_second_derivative_that_is_off_is_found(monkeypatch):
    def off(problem, out):
        return out if not out.requires_grad else Off.apply(problem.q, out)

    class Off(torch.autograd.Function):
        """Gives q a second derivative too many."""

        @staticmethod
        def forward(ctx, q, out):
            ctx.save_for_backward(q)
            return out.view_as(out)

        @staticmethod
        def backward(ctx, grad):
            (q,) = ctx.saved_tensors
            return 1e-3 * q**2, grad.detach()

    monkeypatch.setattr(sdpa, "make_twice_differentiable", off)
    cases = drawn(12, lambda c: c.twice and c.name in ("nope", "rope") and c.impl == "auto")
    assert wrongs(cases)


def test_a_refusal_that_nobody_listed_is_found(monkeypatch):
    def refuse(mask):
        raise ValueError("attention: not today.")

    monkeypatch.setattr(problem_builder, "check_documents", refuse)
    assert "refused: attention: not today." in wrongs(drawn(8, lambda case: case.mask is not None))
