"""Masks with fewer queries than keys, as trees, and as tensors."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Mask, masks
from tests.attending import attend

LENGTH = 6
IDS = torch.tensor([0, 0, 0, 1, 1, 1])
VALID = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1]])
SEEN = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6

# What each mask shows, written as a function of the tokens: row of the batch, query, key.
MASKS: dict[str, tuple[Mask, Any]] = {
    "full": (masks.full, lambda b, i, j: True),
    "causal": (masks.causal, lambda b, i, j: j <= i),
    "window": (masks.sliding_window(2), lambda b, i, j: abs(i - j) < 2),
    "prefix": (masks.prefix(3), lambda b, i, j: j < 3),
    "prefix of each row": (masks.prefix(torch.tensor([1, 4])), lambda b, i, j: j < (1, 4)[b]),
    "sinks": (masks.attention_sinks(1, 2), lambda b, i, j: j <= i and (i - j < 2 or j < 1)),
    "chunked": (masks.chunked(2), lambda b, i, j: i // 2 == j // 2),
    "padding": (masks.padding(VALID), lambda b, i, j: bool(VALID[b, j])),
    "own": (
        Mask(lambda pairs: (pairs.q_position + pairs.kv_position) % 3 != 0),
        lambda b, i, j: (i + j) % 3 != 0,
    ),
    "not": (~(masks.causal & masks.padding(VALID)), lambda b, i, j: j > i or not VALID[b, j]),
    "tree": (
        (masks.causal | ~masks.padding(VALID)) & ~masks.sliding_window(2) | masks.prefix(1),
        lambda b, i, j: ((j <= i or not VALID[b, j]) and abs(i - j) >= 2) or j < 1,
    ),
}


def expected(shows: Any, queries: range) -> Tensor:
    rows = [[[bool(shows(b, i, j)) for j in range(LENGTH)] for i in queries] for b in range(2)]
    return torch.tensor(rows)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(3, 2, 2, LENGTH, 8, generator=generator, dtype=torch.float64)
    return made[0], made[1], made[2]


def by_tensor(seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention under booleans `seen` (batch, q_len, kv_len); zeros for queries that see
    nothing."""
    scores = q @ k.mT * 8**-0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return weights.nan_to_num() @ v


@pytest.mark.parametrize("queries", [6, 3, 1])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_as_a_tensor(name, queries):
    mask, shows = MASKS[name]
    want = expected(shows, range(LENGTH - queries, LENGTH))
    seen = mask.tensor(LENGTH, queries=queries)
    assert seen.dtype == torch.bool
    assert torch.equal(seen.expand(2, -1, -1), want)
    bound = mask.bind(torch.arange(LENGTH - queries, LENGTH), torch.arange(LENGTH))
    assert torch.equal(bound.tensor(), seen)


@pytest.mark.parametrize("queries", [6, 2, 1])
@pytest.mark.parametrize("impl", ["auto", "reference", "blocks"])
@pytest.mark.parametrize("name", MASKS)
def test_fewer_queries_than_keys_see_what_they_see_in_the_whole(name, impl, queries):
    mask, shows = MASKS[name]
    q, k, v = qkv()
    q = q[:, :, -queries:]
    want = by_tensor(expected(shows, range(LENGTH - queries, LENGTH)), q, k, v)
    torch.testing.assert_close(attend(q, k, v, None, mask=mask, impl=impl), want)


@pytest.mark.parametrize("name", [n for n in MASKS if n not in ("padding", "not", "tree")])
def test_steps_with_a_cache_see_what_they_see_in_the_whole(name):
    """A mask that looks ahead shows of later keys what is there by then: none."""
    mask, shows = MASKS[name]
    q, k, v = qkv()
    cache, steps = posenc.KVCache(), []
    for i in range(LENGTH):
        now = slice(i, i + 1)
        steps.append(
            posenc.attention(
                q[:, :, now],
                k[:, :, now],
                v[:, :, now],
                mask=mask,
                cache=cache,
                q_positions=range(i, i + 1),
                kv_positions=range(i, i + 1),
            )
        )
    want = by_tensor(expected(lambda b, i, j: j <= i and shows(b, i, j), range(LENGTH)), q, k, v)
    torch.testing.assert_close(torch.cat(steps, 2), want)


def test_documents_are_those_of_the_queries_and_of_the_keys():
    mask = masks.document(IDS[4:], IDS)
    bound = mask.bind(range(4, LENGTH), range(LENGTH))
    assert torch.equal(mask.tensor(LENGTH, queries=2), IDS[4:, None] == IDS)
    assert torch.equal(bound.tensor(), IDS[4:, None] == IDS)


@pytest.mark.parametrize("stream", ["content", "query"])
@pytest.mark.parametrize("rank", [torch.tensor([3, 1, 0, 2, 5, 4]), torch.arange(12).view(2, 6)])
def test_a_permutation_needs_its_tokens_as_queries(rank, stream):
    mask = masks.permutation(rank=rank, stream=stream)
    q, k, v = qkv()
    attend(q, k, v, None, mask=mask)
    message = r"rank of queries has shape .* must be q_len = 2"
    for joined in (mask, mask & masks.causal, ~mask | masks.full):
        with pytest.raises(ValueError, match=message):
            attend(q[:, :, 4:], k, v, None, mask=joined)
    cache = posenc.KVCache()
    attend(q[:, :, :4], k[:, :, :4], v[:, :, :4], None, mask=masks.causal, cache=cache)
    with pytest.raises(ValueError, match=message):
        where: dict[str, Any] = {"q_positions": range(4, 6), "kv_positions": range(4, 6)}
        posenc.attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], mask=mask, cache=cache, **where)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.causal.tensor(), TypeError, "length must be a whole number of tokens"),
        (lambda: masks.causal.tensor(2.0), TypeError, "whole number of tokens, got 2.0"),
        (lambda: masks.causal.tensor(True), TypeError, "whole number of tokens, got True"),
        (lambda: masks.causal.tensor(-1), ValueError, "length must be at least 0, got -1"),
        (lambda: masks.causal.tensor(2, queries=3), ValueError, "the last of the 2 tokens, got 3"),
        (lambda: masks.document(IDS).tensor(4), ValueError, r"must be q_len = 4"),
        (lambda: masks.causal.bind(range(2), range(2)).tensor(2), ValueError, "leave out length"),
        (lambda: masks.causal & 3, TypeError, "Mask & needs another Mask"),
    ],
)
def test_what_is_no_mask_or_length_says_so(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_inverse_of_a_bound_mask_is_bound():
    bound = masks.causal.bind(torch.arange(3, 6), torch.arange(6))
    assert torch.equal((~bound).tensor(), ~bound.tensor())
    assert torch.equal((~~bound).tensor(), bound.tensor())


PACKED = torch.tensor([0, 1, 2, 0, 1, 2])
BY_POSITION = (
    masks.causal,
    masks.sliding_window(2),
    masks.prefix(1),
    masks.chunked(2),
    masks.attention_sinks(1, 2),
)
APART = (masks.document(IDS), Mask(lambda pairs: IDS[pairs.q_idx] == IDS[pairs.kv_idx]))


def random_tree(rng: random.Random, depth: int, inverted: bool = False) -> tuple[Mask, bool]:
    """A mask, and True if it may show another document where `inverted` is False, or its inverse
    where it is True: positions may be anything, so a leaf that compares them may be True."""
    if depth == 0 or rng.random() < 0.2:
        if rng.random() < 0.4 and not inverted:
            return rng.choice(APART), False
        return rng.choice(BY_POSITION), True
    operator = rng.choice("&|~")
    if operator == "~":
        mask, leaks = random_tree(rng, depth - 1, not inverted)
        return ~mask, leaks
    (a, of_a), (b, of_b) = (random_tree(rng, depth - 1, inverted) for _ in range(2))
    both = (operator == "&") != inverted
    return (a & b if operator == "&" else a | b), (of_a and of_b if both else of_a or of_b)


def test_random_trees_over_packed_rows_are_refused_or_keep_documents_apart():
    """What runs shows no key of another document, and what cannot show one runs."""
    rng, seen = random.Random(0), {True: 0, False: 0}
    q, k, v = (t[..., :2].contiguous() for t in qkv())
    for _ in range(500):
        mask, leaks = random_tree(rng, rng.randint(0, 4))
        seen[leaks] += 1
        given: dict[str, Any] = {"q_positions": PACKED, "kv_positions": PACKED, "mask": mask}
        if leaks:
            with pytest.raises(ValueError, match="keys return to earlier positions"):
                posenc.explain(q, k, v, **given)
            continue
        posenc.explain(q, k, v, **given)
        shown = mask.bind(PACKED, PACKED).tensor()
        assert not (shown & (IDS[:, None] != IDS)).any()
        unique = mask.bind(torch.arange(LENGTH), torch.arange(LENGTH))
        posenc.explain(q, k, v, **{**given, "mask": unique})
    assert min(seen.values()) >= 100


def test_windows_of_layers_do_not_hide_what_a_mask_joins():
    q, k, v = qkv()
    layers = posenc.PerLayer([posenc.PositionEncoding()] * 3, windows=[2, masks.chunked(2), None])
    joined = masks.causal | masks.prefix(1)
    for index, mask in itertools.product(range(3), (masks.causal, joined)):
        with pytest.raises(ValueError, match="keys return to earlier positions"):
            attend(q, k, v, layers.for_layer(index), PACKED, mask)
        apart = mask & masks.document(IDS)
        assert attend(q, k, v, layers.for_layer(index), PACKED, apart).isfinite().all()
    for index, refused in enumerate((True, True, False)):  # only windows compare positions
        if refused:
            with pytest.raises(ValueError, match="keys return to earlier positions"):
                attend(q, k, v, layers.for_layer(index), PACKED, None)
        else:
            attend(q, k, v, layers.for_layer(index), PACKED, None)
