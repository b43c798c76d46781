"""Find how a module is called, and prove that its result depends on positions."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from posenc.inspect.module.build import HEAD_NAMES, parse_arguments
from posenc.inspect.module.form import CALL_HELP, Form, Unbound, forms, from_expression, methods
from posenc.inspect.module.inputs import HEADS, Inputs
from posenc.inspect.module.returned import gap, position_axes, rows, same, tensors
from posenc.inspect.module.subject import Subject, stated_positions, with_length
from posenc.inspect.module.view import CLOSE, Unfit, find_view
from posenc.report.page.failure import one_line

COUNTS = (7, 11)
"""Two lengths that no other axis has, so that axes of positions can be recognized."""

MOST_HEADS = 256
"""A longer list of numbers is taken for no list of heads."""
_SIZES = tuple(
    "head_dim dim channels embed_dim embedding_dim d_model dim_model hidden_size rotary_dim "
    "dim_head".split()
)


class Ignores(Unfit):
    """The module takes positions, but its results do not depend on them."""


class Mixes(Unfit):
    """The module mixes tokens."""


def find_subject(
    module: nn.Module,
    arguments: Sequence[str] = (),
    call: str | None = None,
    remake: Callable[[], nn.Module] | None = None,
) -> Subject:
    """Find the first way to call the module in which its result depends on positions.

    Arguments are bound by name and annotation, or by `call`. `remake` builds the module again if it
    cannot be copied.

    Raises: ValueError with the calls that were tried, and a hint.
    """
    fresh = _copies(module, remake)
    widths, heads = _widths(module, arguments), _heads(module, arguments)
    tried: dict[str, str] = {}
    ignored = None
    for form, width, count in product(_every_form(module, call, tried), widths, heads):
        if count != heads[0] and not form.roles & {"q", "k", "scores"}:
            continue  # heads are no part of this call
        try:
            found = _proved(fresh, form, width, count)
        except Unfit as unfit:
            ignored = form.name if isinstance(unfit, Ignores) else ignored
            if form.name not in tried or isinstance(unfit, Mixes):
                tried[form.name] = str(unfit)
        except Exception as error:  # a form that does not fit may fail in any way
            tried.setdefault(form.name, one_line(error))
        else:
            return with_length(replace(found, ignored=ignored))
    name = type(module).__name__
    said = "; ".join(f"{form}: {why}" for form, why in tried.items())
    raise ValueError(
        f"{name} is not judged. Tried {said}. Say how with --call, as in "
        f'--call "module(x, position_ids=p[None])"; it knows {CALL_HELP}.'
    )


def _every_form(module: nn.Module, call: str | None, tried: dict[str, str]) -> Iterator[Form]:
    """Yield the forms to try; `tried` notes the methods that cannot be bound."""
    if call is not None:
        yield from_expression(call)
        return
    for method in methods(module):
        try:
            yield from forms(module, method)
        except Unbound as unbound:
            tried[f"{method}(...)"] = str(unbound)


def _copies(module: nn.Module, remake: Callable[[], nn.Module] | None) -> Callable[[], nn.Module]:
    """Return a maker of fresh copies; it builds the module again if it cannot be copied."""
    try:
        copy.deepcopy(module)
    except Exception as error:
        if remake is None:
            raise ValueError(
                f"{type(module).__name__} cannot be copied ({one_line(error)}), and a check needs "
                "a copy that no call has changed."
            ) from error
        return remake
    return lambda: copy.deepcopy(module)


def _widths(module: nn.Module, arguments: Sequence[str]) -> list[int]:
    """Return the widths of a token or head to try: as given, as the module or its config says, 64,
    and the last axes of the module's tensors."""
    given, config = parse_arguments(arguments), getattr(module, "config", None)
    said = [held for name in _SIZES for held in (given.get(name), getattr(module, name, None))]
    hidden, heads = (getattr(config, n, None) for n in ("hidden_size", "num_attention_heads"))
    said += [getattr(config, "head_dim", None)]
    said += [hidden // heads] if isinstance(hidden, int) and isinstance(heads, int) else [hidden]
    held = [t.shape[-1] for t in module.state_dict().values() if t.ndim]
    return list(dict.fromkeys(n for n in [*said, 64, *held[:4]] if isinstance(n, int) and n > 1))


def _heads(module: nn.Module, arguments: Sequence[str]) -> list[int]:
    """Return the numbers of heads to try: as given, as the module or its config says, 2, and the
    lengths of the module's lists of numbers, such as slopes."""
    given, config = parse_arguments(arguments), getattr(module, "config", None)
    said = [
        held
        for name in HEAD_NAMES
        for held in (given.get(name), getattr(module, name, None), getattr(config, name, None))
    ]
    tensors = [*vars(module).values(), *module.state_dict().values()]
    lists = [t.shape[0] for t in tensors if isinstance(t, Tensor) and t.ndim == 1]
    known = [n for n in said if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    return list(dict.fromkeys([*known, HEADS, *(n for n in lists[:2] if 0 < n <= MOST_HEADS)]))


def _proved(fresh: Callable[[], nn.Module], form: Form, width: int, heads: int) -> Subject:
    """Return the subject of this form. Raises: Unfit, with the reason."""

    def run(inputs: Inputs) -> Any:
        return form.call(fresh(), replace(inputs, heads=heads))

    def seen(**given: Any) -> list[Tensor]:
        positions = given.pop("positions", torch.arange(COUNTS[1]))
        parts = tensors(run(Inputs(positions, width, **given)))
        return [part for part, found in zip(parts, axes, strict=True) if found]

    short, long = (tensors(run(Inputs(torch.arange(n), width))) for n in COUNTS)
    if len(short) != len(long) or not long:
        raise Unfit("returns no tensor of floating point")
    axes = [position_axes(a, b, COUNTS) for a, b in zip(short, long, strict=True)]
    if not any(axes):
        raise Unfit("returns nothing with an axis of positions")
    plain = seen()
    if any(t.isnan().any() for t in plain):
        raise Unfit("returns NaN")
    if any(not torch.equal(a, b) for a, b in zip(plain, seen(), strict=True)):
        raise Unfit("gives another result for the same call: it is random, or keeps count outside")
    own = [found for found in axes if found]
    _refuse_mixing(form, plain, own, seen)
    varies = [  # equal tokens get different results at another place
        any(_differ(part.roll(1, axis), part) for axis in found)
        for part, found in zip(plain, own, strict=True)
    ]
    if not any(varies):
        refusal = Ignores if form.places_tokens else Unfit
        raise refusal("no position reaches what it returns: equal tokens get equal rows")
    if form.places_tokens:
        spread = seen(positions=2 * torch.arange(COUNTS[1]))
        if not any(_differ(a, b) for a, b in zip(spread, plain, strict=True)):
            raise Ignores("the positions it is given change nothing")
    view = find_view(run, width, axes)
    module = fresh()
    return Subject(module, fresh, form, view, width, heads, stated=stated_positions(module))


def _refuse_mixing(form: Form, plain: list[Tensor], axes: list[tuple[int, ...]], seen: Any) -> None:
    """Refuse layers that mix the sequence, in which a row depends on earlier rows."""
    if not form.roles & {"content", "q", "k"}:
        return
    for changed in (0, COUNTS[1] - 1):
        others = [i for i in range(COUNTS[1]) if i != changed]
        for before, after, found in zip(plain, seen(changed=changed), axes, strict=True):
            if len(found) != 1:
                continue
            a, b = rows(before, found[0])[others], rows(after, found[0])[others]
            if _differ(a, b):
                moved = gap(a, b).max().item()
                raise Mixes(
                    f"another content of token {changed} moves other tokens' rows by {moved:.2g}: "
                    "a layer that reads the sequence, and no position module"
                )


def _differ(a: Tensor, b: Tensor) -> bool:
    return not same(a, b, CLOSE / 100)
