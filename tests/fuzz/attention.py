"""Random attentions, each against a formula in float64.

python -m tests.fuzz.attention CASES [SEED]    prints what was drawn, and every case that differs

The formula is that of tests.fuzz.formulas for the encodings that it knows, and otherwise the
library's own `reference` in float64, with a mask evaluated by NumPy and, where only distances
count, at positions moved to 0. From MANY cases on the run fails if a region has fewer than LEAST
cases that were computed and agree.
"""

import functools
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import posenc
from posenc import masks
from posenc.attend import choose
from posenc.attend.ways import blocks, key_rows, strips, strips_backward
from tests.fuzz import formulas
from tests.fuzz.formulas import Tree, World

MANY, LEAST = 20_000, 500
CLOCK = 1_764_201_600 * 10**9
"""A day of November 2025 in nanoseconds since 1970."""
DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)
NEAR = ("run", "offset", "range", "scattered", "batched", "one row", "real", "packed", "packed")
FAR = ("far", "far rows", "far bursts", "clock", "clock rows", "padding before a clock")
LAYOUTS = NEAR + FAR
NEEDS = ("nothing", "frozen", "gradients", "gradients", "parameters")
"""Who needs gradients: nobody, without grad mode; nobody, in grad mode; q, k, v and the parameters;
the parameters only."""
IMPLS = ("auto", "auto", "auto", "blocks", "sdpa")
LEARNED_BY_DISTANCE = ("alibi:learned=true", "kerple", "t5", "kerple:form=power", "fox")
ROUNDINGS = {torch.float64: 1e4, torch.float32: 84, torch.bfloat16: 8, torch.float16: 16}
"""Allowed error in epsilons of the dtype, times the size of the values: 1e-5 in float32; q and k
are rounded after place 2, weights and sums are accumulated, half types round the output. More
where scores are larger than 8."""
AUTOCAST = 4
"""Times the error that the reference makes under autocast, or that of rounding the result."""
LARGEST_SCORE = 2000.0
"""Rows whose log-sum-exp is larger are not compared: float32 has no digit left for the weights."""
PACKED = 5
"""Tokens of a packed document."""
HALF_EPS = torch.finfo(torch.bfloat16).eps
NAMES = tuple(name for name in posenc.names() if not name.startswith(("sinusoidal", "learned")))
NAMES += ("alibi:learned=true", "kerple:form=power", *formulas.KNOWN, "alibi", "rope+alibi")
REFUSALS = {
    r"keys return to earlier positions of their row": "packed documents under a mask of positions",
    r"q_positions are not those of the last keys": "components elsewhere under a mask of positions",
    r"rank of queries has shape": "a permutation with fewer or more queries than keys",
    r"impl='(sdpa|blocks)' cannot run": "an impl named for what it cannot run",
    r"XPos: a position is \d+ tokens from the origin": "xPos beyond the dtype's range",
    r"MixedRoPE: positions must be below 2\^32": "learned angles beyond float64",
    r"positions must be integers, because its table has a row": "real positions, a table of rows",
    r"positions reach \d+, and float(32|64) rounds them": "real positions beyond their dtype",
}
"""Every message by which posenc may refuse a drawn attention, and its reason."""


@dataclass(frozen=True)
class Case:
    """One draw; everything follows from the seed."""

    seed: int
    name: str
    dtype: torch.dtype
    layout: str
    mask: Tree | None
    impl: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    strided: bool
    needs: str
    """One of NEEDS."""
    prepared: bool
    """As a model prepares it, and called before: elsewhere, then where what is kept serves."""
    stepped: bool
    """A fused step of an optimizer between calls of what was prepared."""
    autocast: bool
    """To bfloat16, which rounds all but float64: q, k, v, scores and weights. How far that may go,
    the reference shows under it. Torch itself cannot join two tensors of float16 under it."""
    small: bool
    """Blocks and strips of a few queries, as long sequences have many of them."""
    spoiled: bool
    """Memory that nobody has written holds NaN."""
    lse: bool
    """Also compare the log-sum-exp."""
    sinks: bool
    """Heads have a sink."""
    twice: bool
    """Also compare second derivatives."""

    @property
    def gradients(self) -> bool:
        return self.needs in ("gradients", "parameters")

    @property
    def long(self) -> bool:
        return self.kv_len > 512

    def regions(self) -> list[str]:
        """The regions that this case is counted for."""
        found = []
        if self.layout in ("far", "far rows", "far bursts"):
            found.append("no run at offsets up to 2^53")
        if "clock" in self.layout:
            found.append("clock nanoseconds")
        if self.layout in ("far rows", "clock rows"):
            found.append("batch rows at different offsets")
        if self.long and self.name in LEARNED_BY_DISTANCE and self.gradients:
            found.append("more than 512 keys, gradients of what is learned")
        if self.mask is not None and self.layout == "packed" and len(self.mask.leaves) > 1:
            found.append("trees of masks over packed rows")
        if self.mask is not None and "~" in self.mask.operators:
            found.append("masks with ~")
        if self.mask is not None and 0 < self.q_len < self.kv_len:
            found += [f"fewer queries, {leaf}" for leaf in set(self.mask.leaves)]
        if self.stepped:
            found.append("a fused step between calls")
        if self.twice:
            found.append("second derivatives")
        return found


REGIONS = (
    "no run at offsets up to 2^53",
    "clock nanoseconds",
    "batch rows at different offsets",
    "more than 512 keys, gradients of what is learned",
    "trees of masks over packed rows",
    "masks with ~",
    "a fused step between calls",
    "second derivatives",
    *(f"fewer queries, {leaf}" for leaf in formulas.LEAVES if leaf != "permutation"),
)
"""Regions of which a large run must have LEAST cases that agree. With fewer queries than keys a
permutation is refused."""


def draw(seed: int) -> Case:
    dice = random.Random(seed)
    long = dice.random() < 0.04
    kv_heads = dice.choice((1, 2))
    kv_len = dice.randint(513, 620) if long else dice.choice((0, 1, 2, 7, 33, 33, 33, 130))
    fewer = dice.randint(0, kv_len)
    lengths = (kv_len, kv_len, fewer, fewer, fewer, 0, 1, kv_len + dice.randint(1, 9))
    q_len = kv_len if long else dice.choice(lengths)
    layout = dice.choice(LAYOUTS)
    leaves = formulas.LEAVES
    if q_len != kv_len and dice.random() < 0.95:  # a permutation would be refused
        leaves = tuple(leaf for leaf in leaves if leaf != "permutation")
    tree = None if dice.random() < 0.1 else formulas.draw_tree(dice, leaves)
    if layout == "packed" and tree is not None and dice.random() < 0.7:
        tree = Tree("&", 0, (tree, Tree("documents")))
    elif long or dice.random() < 0.25:  # a causal mask alone takes the cheapest ways
        tree = Tree("causal")
    needs = dice.choice(NEEDS)
    twice = dice.random() < 0.12 and kv_len <= 33
    if long or twice:
        needs = "gradients"
    learned = dice.choice(LEARNED_BY_DISTANCE)
    name = learned if long or dice.random() < 0.1 else dice.choice(NAMES)
    drawn = Case(
        seed=seed,
        name=name,
        dtype=dice.choice(DTYPES),
        layout=layout,
        mask=tree,
        impl=dice.choice(IMPLS),
        batch=1 if long else dice.choice((1, 2, 3)),
        heads=kv_heads * dice.choice((1, 2)),
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        strided=dice.random() < 0.3,
        needs=needs,
        prepared=dice.random() < 0.4,
        stepped=False,
        autocast=dice.random() < 0.2,
        small=dice.random() < 0.5 and not long,
        spoiled=dice.random() < 0.3,
        lse=dice.random() < 0.3,
        sinks=dice.random() < 0.2,
        twice=twice,
    )
    if drawn.long:
        drawn = replace(drawn, dtype=torch.float32, autocast=False, impl="auto")
        drawn = replace(drawn, batch=2 if "rows" in drawn.layout else 1)
    if drawn.twice:
        drawn = replace(drawn, dtype=dice.choice(DTYPES[:3]), autocast=False, lse=False)
    stepped = drawn.prepared and not drawn.long and dice.random() < 0.5
    autocast = drawn.autocast and drawn.dtype != torch.float16
    return replace(drawn, stepped=stepped, autocast=autocast)


@contextmanager
def conditions(case: Case) -> Iterator[None]:
    """Run with small blocks and spoiled memory, where the case says so."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        if case.spoiled:
            torch.use_deterministic_algorithms(True, warn_only=True)
        if not case.small:
            yield
            return
        with (
            mock.patch.object(blocks, "rows_per_block", lambda problem: 16),
            mock.patch.multiple(choose, MIN_LENGTH_PER_NEAR_KEY=2, SHORT_LENGTH=33),
            mock.patch.multiple(strips, STRIP_ROWS=8, GROUP_ROWS=32),
            mock.patch.multiple(strips_backward, ROWS_AT_ONCE=7, KEYS_AT_ONCE=9),
            mock.patch.object(key_rows, "MAX_CHANGE_BY_BLOCK_SIZE", {16: 64, 8: 128}),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def positions_of(case: Case, claims: posenc.Claims) -> tuple[Any, Any]:
    """Positions of queries and keys, (len) or (batch, len) or a range, with a last axis of
    components where there are several, which stay inside of a grid if the encoding is built for
    one. Queries are the last of the longer side."""
    axes = claims.num_axes
    n, generator = max(case.q_len, case.kv_len), torch.Generator().manual_seed(case.seed)
    counted = torch.arange(n)
    scattered = torch.randperm(4 * n, generator=generator)[:n].sort().values
    bursts = counted % 9 + 10**6 * (counted // 9)
    dice = random.Random(case.seed)
    offset = dice.choice((2**31, 2**40, 2**50, 2**53 - 10**9))
    rows = torch.tensor([0, offset, 7])[: case.batch, None]
    clock_rows = torch.tensor([CLOCK, 0, CLOCK + 10**15])[: case.batch, None]
    padded = scattered + CLOCK
    padded[: case.kv_len // 3] = 0
    steps = {
        "run": counted,
        "range": counted,
        "offset": counted + 5000,
        "scattered": scattered,
        "batched": torch.stack([counted + 11 * row for row in range(case.batch)]),
        "one row": counted[None],
        "real": counted.double() * 1.5,
        "packed": counted % PACKED,
        "far": scattered + offset,
        "far rows": scattered + rows,
        "far bursts": bursts + offset,
        "clock": scattered + CLOCK,
        "clock rows": scattered + clock_rows,
        "padding before a clock": padded,
    }[case.layout]
    ends = slice(n - case.q_len, n), slice(n - case.kv_len, n)
    if case.layout == "range" and axes == 1:
        return tuple(range(end.start, end.stop) for end in ends)
    if axes == 1:
        return tuple(steps[..., end] for end in ends)
    components = torch.stack([steps // (axis + 1) for axis in range(axes)], -1)
    if claims.max_positions is not None:
        # Half of the grid: what is called elsewhere is moved by 2.
        components = components % (claims.max_positions // 2)
    return tuple(components[..., end, :] for end in ends)


def world_of(case: Case, q_positions: Any, kv_positions: Any, axes: int) -> World:
    """What masks compare. Positions with several components count the order in memory."""
    if axes > 1:
        q_positions, kv_positions = range(case.kv_len - case.q_len, case.kv_len), range(case.kv_len)
    both = []
    for where in (q_positions, kv_positions):
        where = torch.tensor(list(where), dtype=torch.int64) if isinstance(where, range) else where
        both.append(where.numpy() + np.zeros((case.batch, 1), dtype=where.numpy().dtype))
    n = max(case.q_len, case.kv_len)
    documents = np.tile(np.arange(n) // PACKED, (case.batch, 1))
    valid = np.ones((case.batch, case.kv_len), dtype=bool)
    valid[:, : case.kv_len // 3] = False
    rank = np.random.default_rng(case.seed).permutation(case.kv_len)
    of_q, of_k = documents[:, n - case.q_len :], documents[:, n - case.kv_len :]
    return World(*both, of_q, of_k, valid, rank)


def moved(where: Any, world: World, axes: int, only_distances: bool) -> Any:
    """Positions for the reference: whole ones of a row from 0 on, where only distances count."""
    if axes > 1 or isinstance(where, range) or where.is_floating_point() or not only_distances:
        return where
    return where - torch.from_numpy(world.first)[:, None] if where.numel() else where


def outcome(case: Case) -> str | None:
    """ "refused" with the reason where the library says no; None where results agree; else what
    differs."""
    torch.manual_seed(case.seed)
    shape = posenc.ModelShape(32, case.heads, case.kv_heads, 8, train_length=16)
    encoding = posenc.create(case.name, shape).for_layer(0).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
            parameter.copy_(parameter.to(case.dtype))
    axes = encoding.claims.num_axes
    q_positions, kv_positions = positions_of(case, encoding.claims)
    world = world_of(case, q_positions, kv_positions, axes)
    longer = max(case.q_len, case.kv_len)
    x = torch.randn(case.batch, longer, 32, dtype=torch.float64)
    known = q_positions if case.q_len == longer else kv_positions
    known = torch.arange(known.start, known.stop) if isinstance(known, range) else known
    inputs = [
        _values(case, heads, n)
        for heads, n in (
            (case.heads, case.q_len),
            (case.kv_heads, case.kv_len),
            (case.kv_heads, case.kv_len),
        )
    ]
    own = posenc.create(case.name, shape).for_layer(0).to(case.dtype)
    own.load_state_dict(encoding.state_dict())
    for kind in (encoding, own):
        kind.requires_grad_(case.gradients)
    state = encoding.state(x, known)
    state = None if state is None else state.detach()
    states = (
        [None, None]
        if state is None
        else [state[:, :, longer - case.q_len :], state[:, :, longer - case.kv_len :]]
    )
    sinks = torch.randn(case.heads).to(case.dtype) if case.sinks else None
    only_distances = encoding.claims.shift_invariant and not case.gradients
    by_formula = case.name in formulas.KNOWN
    compared: list[Tensor] = []
    largest: list[float] = []

    @functools.cache
    def shown_to() -> Tensor:
        shown = np.ones((case.batch, case.q_len, case.kv_len), dtype=bool)
        if case.mask is not None:
            shown = formulas.table(case.mask, world)
        return torch.from_numpy(np.ascontiguousarray(shown))

    def formula(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The output and log-sum-exp in float64."""
        if by_formula:
            q_at, k_at = world.q_at[:, :, None], world.k_at[:, None]
            distance = torch.from_numpy(q_at - k_at)
            return formulas.attend(
                case.name, encoding, *tensors, distance, shown_to(), tuple(states), sinks
            )  # type: ignore[arg-type]
        where = [moved(p, world, axes, only_distances) for p in (q_positions, kv_positions)]
        return posenc.attention(
            *tensors,
            encoding,
            q_positions=where[0],
            kv_positions=where[1],
            q_state=states[0],
            kv_state=states[1],
            impl="reference",
            return_lse=True,
            mask=masks.Mask(lambda s: shown_to()[s.batch, s.q_idx, s.kv_idx]),
            sinks=None if sinks is None else sinks.double(),
        )  # type: ignore[return-value]

    def by_posenc(
        kind: posenc.PositionEncoding,
        tensors: list[Tensor],
        impl: str,
        ahead: int = 0,
        tree: Tree | None = case.mask,
    ) -> tuple[Tensor, Tensor]:
        if isinstance(q_positions, range):
            where = range(q_positions.start + ahead, q_positions.stop + ahead)
        else:
            where = q_positions + ahead
        found = posenc.attention(
            *tensors,
            kind,
            q_positions=where,
            kv_positions=kv_positions,
            q_state=states[0],
            kv_state=states[1],
            impl=impl,
            return_lse=case.lse or impl == "reference",
            mask=None if tree is None else formulas.mask(tree, world),
            sinks=None if sinks is None else sinks.to(tensors[0].dtype),
        )
        return found if isinstance(found, tuple) else (found, None)  # type: ignore[return-value]

    def run(compute: Any, kind: posenc.PositionEncoding, tensors: list[Tensor]) -> list[Tensor]:
        """The output, the log-sum-exp, gradients and second derivatives."""
        followed = case.needs == "gradients"
        leaves = [t.clone().requires_grad_(followed) for t in tensors]
        laid_out = [_laid_out(t, case.strided) for t in leaves]
        with torch.set_grad_enabled(case.needs != "nothing"):
            out, lse = compute(laid_out)
        if not compared:  # by the formula, which comes first
            few = (lse.abs() <= LARGEST_SCORE) | (lse == -torch.inf)
            compared.append(few.detach())
            largest.append(_largest(lse.detach().masked_fill(~few | (lse == -torch.inf), 0)))
        rows = compared[0]
        out = out.masked_fill(~rows[..., None], 0)
        lses = [lse.masked_fill(~rows | (lse == -torch.inf), 0)] if case.lse else []
        wanted = (leaves if followed else []) + list(kind.parameters())
        of = [out, *lses]
        if not (wanted and out.requires_grad):  # a state is what depends on the others
            return of
        # Signs, which no dtype rounds: both sides go back from the same gradient.
        signs = torch.randint(2, out.shape, generator=torch.Generator().manual_seed(case.seed))
        signs = (2 * signs - 1).to(out.dtype)
        given = [signs, *map(torch.ones_like, lses)]
        found = torch.autograd.grad(of, wanted, given, allow_unused=True, create_graph=case.twice)
        again: tuple[Tensor | None, ...] = ()
        if case.twice:
            size = sum(g.square().sum() for g in found[:3] if g is not None and g.requires_grad)
            if isinstance(size, Tensor):
                again = torch.autograd.grad(size, leaves, allow_unused=True)
        found = [t.new_zeros(()) if g is None else g for t, g in zip(wanted, found, strict=True)]
        last = [t.new_zeros(()) if g is None else g for t, g in zip(leaves, again)]  # noqa: B905
        return [t.detach() for t in (*of, *found, *last)]

    wide = [t.double() for t in inputs]
    try:
        # Refusals come before the formula, which knows of none.
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            used = own
            if case.prepared:
                used = own.prepare(q_positions)
                with torch.set_grad_enabled(case.needs != "nothing"):
                    by_posenc(used, inputs, case.impl, 2)
                    by_posenc(used, inputs, case.impl, tree=Tree("padding"))
                    by_posenc(used, inputs, case.impl)
            else:
                with torch.no_grad():
                    by_posenc(used, inputs, "auto")
        if case.stepped:
            _step(own, case)
            encoding.load_state_dict(own.state_dict())
        want = run(formula, encoding, wide)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            rounded = want
            if case.autocast and case.dtype != torch.float64:
                rounded = run(lambda t: by_posenc(own, t, "reference"), own, inputs)
            got = run(lambda t: by_posenc(used, t, case.impl), own, inputs)
    except (ValueError, TypeError) as error:
        return f"refused: {error}"
    if case.mask is not None and case.layout == "packed" and axes == 1:
        if formulas.shows_documents(case.mask, world):
            return "packed documents see one another, and were not refused"
    whats = ["output", *(["lse"] if case.lse else [])]
    whats += ["q", "k", "v"] if case.needs == "gradients" else []
    learned = [name for name, _ in encoding.named_parameters()]
    whats += learned
    whats += ["again q", "again k", "again v"] if case.twice else []
    span = max(1.0, _span(world)) if only_distances or by_formula else _largest(known.double())
    for what, a, b, c in zip(whats, got, want, rounded, strict=False):
        size = max(1.0, _largest(b))
        bound = ROUNDINGS[case.dtype] * torch.finfo(case.dtype).eps * size
        if what.startswith("again"):
            bound *= 100  # of gradients of size 1, differences of products
        elif what not in learned:
            bound *= max(1.0, largest[0] / 8)  # scores have an error in proportion to their size
        elif case.long:
            bound = 1e-3 * _largest(b) + 2e-3  # sums of 600 x 600 pairs
        else:  # sums over all pairs, of terms that may cancel
            if case.dtype == torch.float16 and case.layout != "run":
                continue  # a gradient of frequencies grows with the position, beyond its range
            bound *= max(1, case.batch * case.q_len) * max(1.0, span)
        if rounded is not want:
            off = _largest(c.double() - b)
            single = case.dtype == torch.float32
            bound += AUTOCAST * max(off, HALF_EPS * size) if single else off
        error = _largest(a.double() - b)
        if not error <= bound:
            return f"{what} off by {error:.2g} of {size:.2g}, allowed {bound:.2g}"
    return None


def _step(encoding: posenc.PositionEncoding, case: Case) -> None:
    """Step a fused optimizer, which writes to weights without raising torch's version counter."""
    weights = [p for p in encoding.parameters() if p.is_floating_point()]
    if not weights:
        return
    for weight in weights:
        weight.grad = torch.randn_like(weight).sign()
    kind = torch.optim.SGD if case.seed % 2 else torch.optim.AdamW
    kind(weights, lr=0.25, fused=True).step()
    for weight in weights:
        weight.grad = None


def _span(world: World) -> float:
    last = max(world.q_at.max(initial=0), world.k_at.max(initial=0))
    return float(min(last - world.first.min(initial=0), 10**7))


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


def _values(case: Case, heads: int, length: int) -> Tensor:
    return torch.randn(case.batch, heads, length, 8, dtype=torch.float64).to(case.dtype)


def _laid_out(t: Tensor, strided: bool) -> Tensor:
    """The same numbers; if `strided`, with channels that do not lie side by side."""
    return t.mT.contiguous().mT if strided else t


def reason_of(refusal: str) -> str | None:
    """The reason of a refusal, or None if it is not one of REFUSALS."""
    found = [reason for pattern, reason in REFUSALS.items() if re.search(pattern, refusal)]
    return found[0] if found else None


def tried(case: Case) -> tuple[str, str]:
    """ "agree", "refused" with its reason of REFUSALS, or "wrong" with what differs."""
    try:
        with conditions(case):
            found = outcome(case)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found is None:
        return "agree", ""
    reason = reason_of(found) if found.startswith("refused") else None
    return ("refused", reason) if reason else ("wrong", found)


def main(cases: int, seed: int = 0) -> list[tuple[Case, str]]:
    torch.set_num_threads(1)
    counts, reasons, regions, wrong = Counter[Any](), Counter[str](), Counter[str](), []
    for number in range(seed, seed + cases):
        case = draw(number)
        verdict, found = tried(case)
        counts[verdict] += 1
        if verdict == "agree":
            regions.update(case.regions())
        elif verdict == "refused":
            reasons[found] += 1
        else:
            wrong.append((case, found))
            print(case, found, flush=True)
        if (number + 1 - seed) % 10_000 == 0:
            print(f"{number + 1 - seed} done: {dict(counts)}", flush=True)
    print(f"{cases} attentions from seed {seed}: {dict(counts)}")
    for reason, count in reasons.most_common():
        print(f"  refused {count}: {reason}")
    for region in REGIONS:
        print(f"  agree {regions[region]} ({regions[region] / max(1, cases):.1%}): {region}")
        if cases >= MANY and regions[region] < LEAST:
            wrong.append((draw(seed), f"only {regions[region]} cases of: {region}"))
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
