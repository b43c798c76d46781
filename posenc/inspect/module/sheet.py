"""Somebody else's module: how to call it (found by trying), and what it does with position."""

from __future__ import annotations

import copy
import importlib
import inspect as python_inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[Any, Tensor, torch.dtype], Any]
"""(module, positions (len), dtype of the activations) -> what the module returns."""

Measured = tuple[bool | None, str]
"""Whether a property holds (None: it does not apply), and the numbers."""

_SIZES = ("head_dim", "dim", "channels", "embed_dim", "d_model", "dim_model", "hidden_size")


@dataclass(frozen=True)
class Form:
    """A way to call a module. `anywhere`: it takes positions; else it counts from zero itself."""

    name: str
    call: Call
    anywhere: bool


@dataclass(frozen=True)
class Verdict:
    """One property of a module: whether it holds (None: it does not apply), and the numbers."""

    check: str
    holds: bool | None
    measured: str


def build(path: str, arguments: Sequence[str]) -> nn.Module:
    """The object at "package.module:Class", built with "name=value" arguments; values are JSON, or
    text. A `config` with a model_type becomes that transformers config.

    Raises: ValueError for a path or an argument that does not work.
    """
    module_name, _, attribute = path.partition(":")
    try:
        made_by = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be imported ({error}).") from error
    options: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ValueError(f"--arg must be name=value, got {argument!r}.")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    if isinstance(options.get("config"), dict) and "model_type" in options["config"]:
        from transformers import AutoConfig

        config = dict(options["config"])
        options["config"] = AutoConfig.for_model(config.pop("model_type"), **config)
    try:
        made = made_by(**options)
    except Exception as error:  # somebody else's constructor: whatever it raises is its refusal
        raise ValueError(f"{path}: refuses these arguments: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"{path}: must make a torch module, made a {type(made).__name__}.")
    return made.eval()


def find_form(module: nn.Module, arguments: Sequence[str]) -> Form:
    """The first form that the module answers with one row per position.

    Raises: ValueError that lists what was tried.
    """
    given = {name: text for name, _, text in (a.partition("=") for a in arguments)}
    width = next((int(given[name]) for name in _SIZES if given.get(name, "").isdigit()), 64)
    names = list(python_inspect.signature(module.forward).parameters)
    tried = []
    for form in _forms(width, names, hasattr(module, "rotate_queries_or_keys")):
        try:
            rows = as_rows(form.call(copy.deepcopy(module), torch.arange(7), torch.float32), 7)
        except Exception as error:  # a form that does not fit may fail in any way
            tried.append(f"{form.name} ({type(error).__name__})")
            continue
        if rows is not None and rows.isfinite().all() and not torch.equal(rows[0], rows[5]):
            return form
        tried.append(f"{form.name} (no row per position)")
    raise ValueError(
        f"{type(module).__name__}: forward({', '.join(names)}) fits nothing; "
        f"tried {', '.join(tried)}."
    )


def _forms(width: int, names: list[str], rotates: bool) -> list[Form]:
    def x(p: Tensor, d: torch.dtype) -> Tensor:
        return torch.ones(1, len(p), width, dtype=d)

    def q(p: Tensor, d: torch.dtype) -> Tensor:
        return torch.ones(1, 1, len(p), width, dtype=d)

    turn = Form(
        "rotate_queries_or_keys(t)", lambda m, p, d: m.rotate_queries_or_keys(q(p, d)), False
    )
    with_ids = Form("(x, position_ids)", lambda m, p, d: m(x(p, d), p[None]), True)
    return [
        *([turn] if rotates else []),
        *([with_ids] if names[:2] == ["x", "position_ids"] else []),
        Form("(q, k, positions)", lambda m, p, d: m(q(p, d), q(p, d), p), True),
        Form("(x, positions)", lambda m, p, d: m(x(p, d), p), True),
        Form("(positions)", lambda m, p, d: m(p), True),
        Form("(positions, positions)", lambda m, p, d: m(p, p), True),
        Form("(q_len, kv_len)", lambda m, p, d: m(len(p), len(p)), False),
        Form("(x)", lambda m, p, d: m(x(p, d)), False),
        Form("(q, k)", lambda m, p, d: m(q(p, d), q(p, d)), False),
    ]


def as_rows(returned: Any, count: int) -> Tensor | None:
    """The result as (count, features); None if it has no axis of positions."""
    parts = returned if isinstance(returned, (tuple, list)) else (returned,)
    rows = []
    for part in parts:
        if not isinstance(part, Tensor) or part.ndim < 2 or not part.is_floating_point():
            continue
        if part.shape[-2] == count:
            rows.append(part.movedim(-2, 0).reshape(count, -1))
    return torch.cat(rows, dim=-1).detach() if rows else None


@torch.no_grad()
def verdicts(module: nn.Module, form: Form, length: int = 4096) -> list[Verdict]:
    """Check what every encoding of posenc must satisfy, as far as the module's form allows."""
    return [_verdict(check, module, form, length) for check in _CHECKS]


def _verdict(check: str, module: nn.Module, form: Form, length: int) -> Verdict:
    try:
        return Verdict(check, *_CHECKS[check](module, form, length))
    except Exception as error:  # somebody else's code: whatever it raises is the finding
        line = (str(error).strip().splitlines() or [""])[0][:120]
        return Verdict(check, None, f"does not run: {type(error).__name__}: {line}")


def _rows(module: nn.Module, form: Form, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the module gives for positions 0 .. length - 1."""
    rows = as_rows(form.call(module, torch.arange(length), dtype), length)
    if rows is None:
        raise ValueError("no row per position")
    return rows


def _fresh(
    module: nn.Module, form: Form, length: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The same from a copy that no call has changed."""
    return _rows(copy.deepcopy(module), form, length, dtype)


def _apart(exact: Tensor, rounded: Tensor) -> Measured:
    """Compare rows in bfloat16 with float32 rows rounded to bfloat16 at the end."""
    have, could = len(rounded.bfloat16().unique(dim=0)), len(exact.bfloat16().unique(dim=0))
    error = (rounded.float() - exact).abs().max().item()
    allowed = 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max().item()
    text = f"{have:,} of {len(exact):,} positions distinct ({could:,} possible), error {error:.2g}"
    return have >= 0.95 * could and error <= allowed, text


def _activations(module: nn.Module, form: Form, length: int) -> Measured:
    exact = _fresh(module, form, length).float()
    return _apart(exact, _fresh(module, form, length, torch.bfloat16))


def _cast(module: nn.Module, form: Form, length: int) -> Measured:
    exact = _fresh(module, form, length).float()
    return _apart(exact, _rows(copy.deepcopy(module).bfloat16(), form, length, torch.bfloat16))


def _history(module: nn.Module, form: Form, length: int) -> Measured:
    """Compare each call of a sequence of calls with the same call of a fresh module."""
    wide, narrow = torch.float32, torch.bfloat16
    calls, found = [(length, wide), (64, wide), (length, narrow), (length, wide)], []
    for order in (calls, calls[2:]):
        used = copy.deepcopy(module)
        for n, dtype in order:
            got, want = _rows(used, form, n, dtype), _fresh(module, form, n, dtype)
            name = str(dtype).removeprefix("torch.")
            if got.dtype != want.dtype:
                found.append(f"{name} after others returns {got.dtype}, fresh {want.dtype}")
            elif not torch.equal(got, want):
                gap = (got - want).abs().max().item()
                found.append(f"{n} tokens in {name} after others are off by {gap:.2g}")
    return not found, "; ".join(dict.fromkeys(found)) or "all calls as if fresh"


def _lengths(module: nn.Module, form: Form, length: int) -> Measured:
    long, short = _fresh(module, form, length)[:16], _fresh(module, form, 16)
    if long.shape != short.shape:
        return None, "a matrix, whose width is the length"
    gap = (long - short).abs().max().item()
    return gap < 1e-5, f"positions below 16 move by {gap:.2g} at length {length:,}"


def _rows_alone(module: nn.Module, form: Form, length: int) -> Measured:
    if form.name != "(x, position_ids)":
        return None, "takes no batch of positions"
    near = torch.arange(16)
    x = torch.ones(2, 16, 8)
    together = copy.deepcopy(module)(x, torch.stack([near, near + length]))[0][0]
    alone = copy.deepcopy(module)(x[:1], near[None])[0][0]
    gap = (together - alone).abs().max().item()
    return gap < 1e-5, f"beside a far row it moves by {gap:.2g}"


def _far(module: nn.Module, form: Form, length: int) -> Measured:
    """Compare angles at 10^6 by cosines of their differences, which a shift must not change."""
    if not form.anywhere:
        return None, "takes no positions"

    def parts(start: int) -> list[Tensor]:
        returned = form.call(copy.deepcopy(module), torch.arange(start, start + 8), torch.float32)
        every = returned if isinstance(returned, tuple) else (returned,)
        tensors = [t for t in every if isinstance(t, Tensor) and t.ndim >= 2 and t.shape[-2] == 8]
        return [t.reshape(8, -1).double() for t in tensors]

    def turned(start: int) -> Tensor:
        """What a shift by `start` must not change, in radians or in shares of the norm."""
        found = parts(start)
        if form.name == "(q, k, positions)" and len(found) == 2:
            return (found[0][3:] * found[1][:-3]).sum(-1) / found[0].norm(dim=-1)[3:] ** 2
        if len(found) == 2:  # cos and sin
            angle = torch.atan2(found[1], found[0])
            return angle[3:] - angle[:-3]
        first = parts(0)
        if len(first) == 1 and torch.allclose(first[0][:, 0], torch.arange(8.0).double()):
            return found[0][3:] - found[0][:-3]
        raise ValueError("returns neither cos and sin nor angles")

    gap = turned(0) - turned(10**6)
    error = torch.atan2(gap.sin(), gap.cos()).abs().max().item()
    return error < 1e-3, f"differences of 3 positions are off by {error:.2g} rad"


_CHECKS: dict[str, Callable[[nn.Module, Form, int], Measured]] = {
    "bfloat16 activations keep positions apart": _activations,
    "module.bfloat16() keeps positions apart": _cast,
    "earlier calls leave no trace": _history,
    "a position keeps its values as the sequence grows": _lengths,
    "a row does not depend on the batch's longest": _rows_alone,
    "angles right at position 1,000,000": _far,
}
