"""Masks and attentions by their formulas, in float64, for tests.fuzz.attention.

Nothing here asks posenc for a result: masks are evaluated by NumPy on whole positions, and scores
are computed from the papers' formulas and exact distances, with the parameters of an encoding.
"""

import functools
import math
import random
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from posenc import masks


@dataclass(frozen=True)
class World:
    """What masks compare: positions (batch, len), documents, padding, ranks. Numbers of leaves are
    counted from `first`, the least position of each row."""

    q_at: np.ndarray
    k_at: np.ndarray
    q_documents: np.ndarray
    k_documents: np.ndarray
    valid: np.ndarray
    rank: np.ndarray

    @property
    def first(self) -> np.ndarray:
        every = np.concatenate([self.q_at, self.k_at], axis=1)
        return every.min(1) if every.shape[1] else np.zeros(len(every), dtype=every.dtype)


POSITIONAL = ("causal", "window", "prefix", "chunked", "sinks")
LEAVES = (*POSITIONAL, "padding", "documents", "permutation", "full")


@dataclass(frozen=True)
class Tree:
    """A leaf, one of LEAVES with its number, or an operator with parts."""

    kind: str
    number: int = 0
    parts: tuple["Tree", ...] = ()

    def __str__(self) -> str:
        if self.kind == "~":
            return f"~{self.parts[0]}"
        if self.parts:
            return f"({f' {self.kind} '.join(map(str, self.parts))})"
        return f"{self.kind}{self.number or ''}"

    @property
    def leaves(self) -> tuple[str, ...]:
        if not self.parts:
            return (self.kind,)
        return tuple(leaf for part in self.parts for leaf in part.leaves)

    @property
    def operators(self) -> tuple[str, ...]:
        own = (self.kind,) if self.parts else ()
        return own + tuple(each for part in self.parts for each in part.operators)


def draw_tree(dice: random.Random, leaves: tuple[str, ...], depth: int = 3) -> Tree:
    if depth == 0 or dice.random() < 0.3:
        return Tree(dice.choice(leaves), dice.randint(1, 6))
    operator = dice.choice("&&&||~")
    parts = tuple(draw_tree(dice, leaves, depth - 1) for _ in range(1 if operator == "~" else 2))
    return Tree(operator, 0, parts)


def table(tree: Tree, world: World) -> np.ndarray:
    """True where a query sees a key, (batch, q_len, kv_len)."""
    if tree.parts:
        found = [table(part, world) for part in tree.parts]
        if tree.kind == "~":
            return ~found[0]
        return found[0] & found[1] if tree.kind == "&" else found[0] | found[1]
    q, k = world.q_at[:, :, None], world.k_at[:, None, :]
    apart, first, n = q - k, world.first[:, None, None], tree.number
    everywhere = np.ones(apart.shape, dtype=bool)
    match tree.kind:
        case "causal":
            return apart >= 0
        case "window":
            return np.abs(apart) < n
        case "prefix":
            return everywhere & (k < first + n)
        case "chunked":
            return q // n == k // n
        case "sinks":
            return (apart >= 0) & ((np.abs(apart) < n + 2) | (k < first + n))
        case "padding":
            return everywhere & world.valid[:, None]
        case "documents":
            return everywhere & (world.q_documents[:, :, None] == world.k_documents[:, None])
        case "permutation":
            own, other = world.rank[:, None], world.rank
            return everywhere & ((other < own) | np.eye(len(other), dtype=bool))
    return everywhere


def mask(tree: Tree, world: World) -> masks.Mask:
    """The same mask by posenc."""
    if tree.parts:
        found = [mask(part, world) for part in tree.parts]
        if tree.kind == "~":
            return ~found[0]
        return found[0] & found[1] if tree.kind == "&" else found[0] | found[1]
    n, first = tree.number, world.first
    begin = int(first[0]) if len(set(first.tolist())) == 1 else torch.from_numpy(first)
    if isinstance(begin, int) and begin < 0:
        begin = torch.from_numpy(first)
    match tree.kind:
        case "causal":
            return masks.causal
        case "window":
            return masks.sliding_window(n)
        case "prefix":
            return masks.prefix(begin + n)
        case "chunked":
            return masks.chunked(n)
        case "sinks":
            return masks.causal & (masks.sliding_window(n + 2) | masks.prefix(begin + n))
        case "padding":
            return masks.padding(torch.from_numpy(world.valid))
        case "documents":
            sides = (torch.from_numpy(t) for t in (world.q_documents, world.k_documents))
            return masks.document(*sides)
        case "permutation":
            return masks.permutation(rank=torch.from_numpy(world.rank), stream="content")
    return masks.full


def shows_documents(tree: Tree, world: World) -> bool:
    """True for a mask of positions only that shows packed documents to one another."""
    if not set(tree.leaves) <= set(POSITIONAL) or "~" in tree.operators:
        return False
    row = world.k_at[0]
    if not (np.diff(row) < 0).any() or len(set(row.tolist())) == len(row):
        return False  # no key returns to an earlier position
    strangers = world.q_documents[:, :, None] != world.k_documents[:, None]
    return bool((table(tree, world) & strangers).any())


def alibi(encoding: Any, distance: Tensor, heads: int) -> Tensor:
    slopes = [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]
    slope = torch.tensor(slopes, dtype=torch.float64)
    if encoding.log_slopes is not None:
        slope = encoding.log_slopes.exp()
    return -slope[:, None, None] * distance.double().abs()[:, None]


def t5(encoding: Any, distance: Tensor, heads: int) -> Tensor:
    near = distance.double().clamp(min=0).floor()  # buckets are those of whole distances
    far = 16 + (near.clamp(min=16) / 16).log() / math.log(128 / 16) * 16
    bucket = torch.where(near < 16, near, far.floor().clamp(max=31)).long()
    return encoding.weight[bucket].movedim(-1, 1)


def kerple(encoding: Any, distance: Tensor, heads: int) -> Tensor:
    r1, r2 = (_clamped(r)[:, None, None] for r in (encoding.r1, encoding.r2))
    return -r1 * (1 + r2 * distance.double().abs()[:, None]).log()


def kerple_power(encoding: Any, distance: Tensor, heads: int) -> Tensor:
    r1, r2 = _clamped(encoding.r1)[:, None, None], _clamped(encoding.r2, 2.0)[:, None, None]
    size = distance.double().abs()[:, None]
    return -r1 * torch.where(size == 0, 0.0, size.clamp(min=1e-300) ** r2)


def _clamped(r: Tensor, high: float = math.inf) -> Tensor:
    """r within its bounds; gradients ignore them, as the authors' code does."""
    return r + (r.clamp(0.01, high) - r).detach()


def sandwich(encoding: Any, distance: Tensor, heads: int) -> Tensor:
    total = sum(torch.cos(angles(distance, 64, t)) for t in range(64))
    share = torch.tensor([8 * (h + 1) / heads for h in range(heads)], dtype=torch.float64)
    return total[:, None] / share[:, None, None]


BIASES = {
    "alibi": alibi,
    "alibi:learned=true": alibi,
    "t5": t5,
    "kerple": kerple,
    "kerple:form=power": kerple_power,
    "sandwich": sandwich,
}


TURN = Decimal("6.283185307179586476925286766559005768394338798750211641949889")


def rotated_scores(q: Tensor, k: Tensor, distance: Tensor, interleaved: bool) -> Tensor:
    """R(i) q . R(j) k: with pairs as complex numbers, the real part of q conj(k) e^(i D w)."""
    pairs = q.shape[-1] // 2
    if interleaved:
        (qa, qb), (ka, kb) = ((t[..., 0::2], t[..., 1::2]) for t in (q, k))
    else:
        (qa, qb), (ka, kb) = (t.chunk(2, -1) for t in (q, k))
    total = q.new_zeros(*q.shape[:3], k.shape[2])
    for t in range(pairs):
        angle = angles(distance, pairs, t)[:, None]
        along = qa[..., None, t] * ka[..., None, :, t] + qb[..., None, t] * kb[..., None, :, t]
        across = qb[..., None, t] * ka[..., None, :, t] - qa[..., None, t] * kb[..., None, :, t]
        total = total + along * angle.cos() - across * angle.sin()
    return total


@functools.cache
def frequency(pairs: int, t: int) -> Decimal:
    with localcontext(prec=60):
        return Decimal(10000) ** -(Decimal(t) / pairs)


def angles(distance: Tensor, pairs: int, t: int) -> Tensor:
    """distance * 10000^(-t / pairs); of far distances the rest after whole turns, by decimals."""
    near = distance.double() * float(frequency(pairs, t))
    far = distance.abs() > 2**12  # float64 would round the angle by more than 1e-12
    if not far.any():
        return near
    with localcontext(prec=60):
        each = {
            d: float(Decimal(d) * frequency(pairs, t) % TURN) for d in set(distance[far].tolist())
        }
    near[far] = torch.tensor([each[d] for d in distance[far].tolist()], dtype=torch.float64)
    return near


KNOWN = ("nope", "rope", "rope_interleaved", "fox", *BIASES)
"""Encodings whose attention is computed here; that of the others by impl="reference"."""


def attend(
    name: str,
    encoding: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance: Tensor,
    shown: Tensor,
    states: tuple[Tensor | None, Tensor | None],
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of an attention with an encoding of KNOWN, in float64.

    distance (batch, q_len, kv_len), whole or real; shown: the same, True where a query sees a key.
    """
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if name in ("rope", "rope_interleaved"):
        scores = rotated_scores(q, k, distance, name == "rope_interleaved")
    else:
        scores = q @ k.mT
    scores = scores * q.shape[-1] ** -0.5
    if name == "fox":
        of_q, of_k = states
        assert of_q is not None and of_k is not None
        scores = scores + of_q[..., :, None] - of_k[..., None, :]
    elif name in BIASES:
        scores = scores + BIASES[name](encoding, distance, q.shape[1])
    hidden = ~shown[:, None]
    scores = scores.masked_fill(hidden, -1e300)
    if sinks is not None:
        own = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores, hidden = torch.cat([scores, own], -1), F.pad(hidden, (0, 1), value=False)
        v = F.pad(v, (0, 0, 0, 1))
    if not scores.shape[-1]:
        nothing = q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * q.sum()
        return nothing, q.new_full(q.shape[:3], -math.inf) + 0 * q.sum()
    weights = scores.softmax(-1).masked_fill(hidden, 0)
    blind = hidden.all(-1)
    return weights @ v, scores.logsumexp(-1).masked_fill(blind, -math.inf)
