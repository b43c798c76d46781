"""Prove that a call shows positions, and describe the module under test."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from posenc.inspect.module.call import HEADS, RETURNS, WAYS, WIDTH, Form, Inputs, Unbound, forms
from posenc.inspect.module.load import Function
from posenc.inspect.module.returned import gap, position_axes, rows, same, tensors
from posenc.inspect.module.view import CLOSE, Unfit, View, find_view
from posenc.report.page.failure import one_line

Measured = tuple[bool | None, str]
"""True if a property holds (None: it does not apply), and the numbers."""


LONGEST = 4096
SLOW = 0.3
"""If a call takes longer, in seconds, no longer sequence is tried."""
MOST_NUMBERS = 2**23
_STATED = tuple(
    "max_position_embeddings max_positions max_seq_len max_seq_len_cached "
    "max_sequence_length max_seqlen max_length max_len num_positions num_embeddings".split()
)
_COUNTS = (7, 11, 13, 17)
"""Lengths; two that no other axis has, so that axes of positions can be recognized."""

ADAPTER = (
    r"printf 'import torch\ndef cos_sin(x, positions):\n a = positions[:, None] / 1e4 ** "
    r"(torch.arange(0, 64, 2) / 64)\n return a.cos(), a.sin()\n' > adapter.py && "
    "posenc inspect module adapter.py:cos_sin --as cos-sin"
)
"""A line that writes an adapter and inspects it."""


class Mixes(Unfit):
    """The module mixes tokens."""


class CountsHeads(Unfit):
    """The module counts positions along the heads."""


@dataclass(frozen=True)
class Limit:
    """The smallest number of tokens that the module refused, and its message."""

    tokens: int
    error: str


@dataclass(frozen=True)
class Subject:
    """A module under test. fresh: makes an unused copy. way: the word of --as. length: number of
    tokens in the checks. stated: number of positions that it claims, or None. ignores: True if the
    positions that it is given change nothing. given: the arguments of its constructor.
    """

    module: nn.Module
    fresh: Callable[[], nn.Module]
    way: str
    form: Form
    view: View
    width: int = WIDTH
    heads: int = HEADS
    length: int = LONGEST
    limit: Limit | None = None
    stated: int | None = None
    ignores: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)

    def inputs(self, positions: Tensor | int, **given: Any) -> Inputs:
        """Return the inputs of a call at these positions, or at the first `positions` ones."""
        if isinstance(positions, int):
            positions = torch.arange(positions)
        given = {"probe": self.view.probe, **given}
        return Inputs(positions, self.width, heads=self.heads, **given)

    def see(
        self,
        inputs: Inputs,
        module: nn.Module | None = None,
        form: Form | None = None,
        row: int = 0,
    ) -> Tensor:
        """Return the module's result for these inputs, from a fresh copy unless one is given."""
        returned = (form or self.form).call(self.fresh() if module is None else module, inputs)
        return self.view.read(returned, inputs.batch, row)


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and those inside it, but the shell of a function."""
    shells = Function | nn.ModuleList
    return (part for part in module.modules() if not isinstance(part, shells))


def find_subject(
    fresh: Callable[[], nn.Module],
    way: str,
    name: str = "",
    width: int = WIDTH,
    heads: int = HEADS,
    given: Mapping[str, Any] | None = None,
) -> Subject:
    """Call a module in a way, in the first layout in which its result depends on positions.

    Raises: ValueError with what was tried and two ways out.
    """
    tried: dict[str, str] = {}
    module = fresh()
    name = name or type(module).__name__
    try:
        for form in forms(module, way):
            try:
                subject = _proved(fresh, way, form, width, heads)
            except (Mixes, CountsHeads) as unfit:
                tried = {form.name: str(unfit)}
                break
            except Unfit as unfit:
                tried[form.name] = str(unfit)
            except Exception as error:  # a call that does not fit may fail in any way
                tried.setdefault(form.name, one_line(error))
            else:
                subject = replace(subject, given=given or {})
                return subject if subject.ignores else with_length(subject)
    except Unbound as unbound:
        reason = str(unbound)
    else:
        reason = f"--as {way} calls " + "; ".join(f"{form}: {why}" for form, why in tried.items())
    others = ", ".join(word for word in WAYS if word != way)
    raise ValueError(
        f"{name} is not judged: {reason.rstrip('.')}. It must return {RETURNS[way]}; --as may be "
        f"{others} too, --width and --heads are {width} and {heads}. Or write an adapter that is "
        f"called so and calls yours, as this line does: {ADAPTER}"
    )


def _proved(
    fresh: Callable[[], nn.Module], way: str, form: Form, width: int, heads: int
) -> Subject:
    """Return the module as a subject of checks, called in this form, if it can be judged so.

    Called with few and with many positions it must return tensors of floating point with an axis of
    positions, no NaN, and the same for the same input; and positions must change what it returns.

    fresh: builds the module. way: what --as says that it returns. form: how it is called.
    Raises: Unfit, with the first of these that fails.
    """
    few, many, *_ = (n for n in _COUNTS if n not in (width, heads))

    def run(inputs: Inputs) -> Any:
        return form.call(fresh(), replace(inputs, heads=heads))

    axes = _axes_of_results(run, width, (few, many))

    def see(**changes: Any) -> list[Tensor]:
        """Return the tensors with an axis of positions, of a call with `changes` of its inputs."""
        parts = tensors(run(replace(Inputs(torch.arange(many), width), **changes)))
        return [part for part, has_positions in zip(parts, axes, strict=True) if has_positions]

    plain = see()
    _refuse_chance(plain, see)
    axes_seen = [part_axes for part_axes in axes if part_axes]
    _refuse_mixing(form, plain, axes_seen, see, many)
    if not _any_place_differs(plain, axes_seen):
        _refuse_heads(form, plain)
        raise Unfit("no position reaches what it returns: equal tokens get equal rows")
    ignores = False
    if form.places_tokens:
        spread = see(positions=2 * torch.arange(many))
        ignores = not any(_differ(a, b) for a, b in zip(spread, plain, strict=True))
    view = find_view(run, way, form, width, axes)
    module = fresh()
    stated = stated_positions(module)
    return Subject(module, fresh, way, form, view, width, heads, stated=stated, ignores=ignores)


def _axes_of_results(
    run: Callable[[Inputs], Any], width: int, counts: tuple[int, int]
) -> list[tuple[int, ...]]:
    """Return the axes of positions of each tensor that is returned, from calls with two counts."""
    short, long = (tensors(run(Inputs(torch.arange(count), width))) for count in counts)
    if len(short) != len(long) or not long:
        raise Unfit("returns no tensor of floating point")
    axes = [position_axes(a, b, counts) for a, b in zip(short, long, strict=True)]
    if not any(axes):
        raise Unfit("returns nothing with an axis of positions")
    return axes


def _refuse_chance(plain: list[Tensor], see: Callable[[], list[Tensor]]) -> None:
    """Refuse NaN, and results that change from one call to the same call again."""
    if any(t.isnan().any() for t in plain):
        raise Unfit("returns NaN")
    if any(not torch.equal(a, b) for a, b in zip(plain, see(), strict=True)):
        raise Unfit("gives another result for the same call: it is random, or keeps count outside")


def _any_place_differs(parts: list[Tensor], axes: list[tuple[int, ...]]) -> bool:
    """Return True if equal tokens get different results at another place."""
    for part, part_axes in zip(parts, axes, strict=True):
        if any(_differ(part.roll(1, axis), part) for axis in part_axes):
            return True
    return False


def _refuse_mixing(
    form: Form, plain: list[Tensor], axes: list[tuple[int, ...]], see: Any, count: int
) -> None:
    """Refuse layers that mix the sequence, in which a row depends on earlier rows."""
    if not form.words & {"x", "q", "k"}:
        return
    for changed in (0, count - 1):
        others = [i for i in range(count) if i != changed]
        for before, after, part_axes in zip(plain, see(changed=changed), axes, strict=True):
            if len(part_axes) != 1:
                continue
            rows_before = rows(before, part_axes[0])[others]
            rows_after = rows(after, part_axes[0])[others]
            if _differ(rows_before, rows_after):
                moved = gap(rows_before, rows_after).max().item()
                raise Mixes(
                    f"another content of token {changed} moves other tokens' rows by {moved:.2g}: "
                    "a layer that reads the sequence, and no position module"
                )


def _refuse_heads(form: Form, plain: list[Tensor]) -> None:
    """Refuse a module whose equal heads get different rows: it counts along the heads."""
    if form.content != "bhnw" or not form.words & {"x", "q", "k"}:
        return
    for part in plain:
        if part.ndim == 4 and _differ(part.roll(1, 1), part):
            raise CountsHeads(
                "equal tokens get equal rows, and equal heads do not: it takes the heads for "
                "tokens. If it is made for (batch, tokens, heads, width), transpose in an adapter"
            )


def _differ(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b differ by more than rounding."""
    return not same(a, b, CLOSE / 100)


def stated_positions(module: nn.Module) -> int | None:
    """Return how many positions a module, one inside it or its config says it has."""
    for part in modules_of(module):
        claimed = getattr(getattr(part, "claims", None), "max_positions", None)
        if claimed is not None:
            return claimed
        config = getattr(part, "config", None)
        for name, holder in itertools.product(_STATED, (config, part)):
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def with_length(subject: Subject) -> Subject:
    """Return the subject with the longest sequence that it runs in reasonable time, up to
    LONGEST."""
    good = 11
    for count in (2**i for i in range(4, LONGEST.bit_length())):
        start = time.perf_counter()
        error = _refusal(subject, count)
        if error is not None:
            return _bisected(subject, good, count, error)
        good = count
        size = subject.see(subject.inputs(count)).numel()
        is_bias = subject.view.kind == "bias"
        most = MOST_NUMBERS if is_bias else 2 * MOST_NUMBERS
        if time.perf_counter() - start > SLOW or size * (4 if is_bias else 2) > most:
            break
    return replace(subject, length=good)


def _bisected(subject: Subject, good: int, bad: int, error: str) -> Subject:
    """Find the smallest number of tokens that is refused, above `good` and up to `bad`."""
    while bad - good > 1:
        middle = (good + bad) // 2
        refusal = _refusal(subject, middle)
        if refusal is None:
            good = middle
        else:
            bad = middle
            error = refusal
    return replace(subject, length=good, limit=Limit(bad, error))


def _refusal(subject: Subject, count: int) -> str | None:
    """Return the message of the error that a call with `count` tokens ends with; None if it
    runs."""
    try:
        subject.see(subject.inputs(count))
    except Exception as error:  # foreign code: any exception is its limit
        return one_line(error)
    return None
