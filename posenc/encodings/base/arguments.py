"""Check and record the arguments of an encoding's constructor, to print and to compare them."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

from torch import nn

from posenc.arguments import FARTHEST, check_count, check_flag, check_number, instead_of, misfit

_FROM_ONE = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_width")
_FROM_ONE += ("max_positions", "max_distance", "clamp_len", "extent", "num_profiles", "floor_scale")
_POSITIVE = ("base", "rope_theta", "init_L", "bias_max", "partial_rotary_factor", "scale_base")


class UnknownOption(ValueError):
    """Report options that an encoding lacks. `name`: the first; `accepted`: those it has."""

    def __init__(self, owner: str, given: Iterable[str], accepted: Iterable[str]) -> None:
        self.accepted = tuple(accepted)
        wrong = sorted(set(given) - set(self.accepted))
        self.name = wrong[0]
        other = instead_of(self.name, self.accepted)
        hint = f" Did you mean {other.removesuffix('=')!r}?" if other else ""
        super().__init__(
            f"{owner}: unknown option {', '.join(wrong)}; "
            f"it takes {', '.join(self.accepted) or 'none'}.{hint}"
        )


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that arguments annotated bool, int or float (or None) must match. Raise
    TypeError if they do not, and ValueError for NaN and infinity."""
    signature, ours = inspect.signature(init), init.__module__.startswith("posenc.")

    @functools.wraps(init)
    def built(*args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            raise TypeError(misfit(init, args, kwargs)) from None
        given = dict(bound.arguments)
        own = list(given.items())[1:]
        vars(args[0]).setdefault("_given", dict(own))  # unchanged, to be saved in files
        bound.apply_defaults()
        kept = {n: _comparable(v) for n, v in list(bound.arguments.items())[1:]}
        vars(args[0]).setdefault("_arguments", kept)
        # the outermost constructor's arguments, for `described`
        texts = {name: text for name, value in given.items() if (text := _shown(value))}
        vars(args[0]).setdefault("_built_with", texts)
        owner = type(args[0]).__name__
        for name, value in given.items():
            _check(owner, name, value, signature.parameters[name].annotation, ours)
        early = None
        try:
            init(*args, **kwargs)
        except AttributeError as error:  # torch's, if super().__init__() was not called
            early = error
        if "_parameters" not in vars(args[0]):
            raise TypeError(f"{owner}: __init__ must call super().__init__() first.") from early
        if early is not None:
            raise early
        vars(args[0])["_attributes"] = tuple(vars(args[0]))  # the outermost constructor's are all

    return built


def alike(a: nn.Module, b: nn.Module) -> bool:
    """Return True if two encodings have equal classes and arguments, their submodules included."""
    own, other = a.__dict__, b.__dict__
    prepared = own.get("_arguments") is other.get("_arguments")  # one is a shallow copy
    if prepared and own["_modules"] is other["_modules"]:
        return type(a) is type(b)
    return likeness(a) == likeness(b)


def likeness(encoding: nn.Module) -> tuple[Any, ...]:
    """Return class and arguments of each module. A computed default replaces None."""
    return tuple(
        (type(m), *(_comparable(vars(m).get(name, given)) for name, given in arguments.items()))
        for m in encoding.modules()
        for arguments in [vars(m).get("_arguments", {})]
    )


def _comparable(value: Any) -> Any:
    """Convert an argument so that equal ones compare equal: 10000 and 10000.0 become the same,
    also in a tuple or a scaling."""
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_comparable(getattr(value, f.name)) for f in fields(value))
    return _text(value)


def described(built: Any) -> str:
    """Return the text between parentheses in repr(encoding): arguments that differ from their
    default, and always rope_theta, base and scaling."""
    shown = []
    for name, parameter in inspect.signature(type(built)).parameters.items():
        given = getattr(built, "_built_with", {}).get(name) or _shown(parameter.default)
        text = _shown(vars(built)[name]) if name in vars(built) else given
        default = parameter.default is parameter.empty or text != _shown(parameter.default)
        if text and (default or name in _ALWAYS):
            shown.append(f"{name}={text}")
    return ", ".join(shown)


_ALWAYS = ("rope_theta", "base", "scaling")
_LONGEST = 200
"""Maximum characters that repr shows of one argument; a list of frequencies can have thousands."""


def _shown(value: Any) -> str:
    """Return an argument as text of at most _LONGEST characters."""
    text = _text(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _text(value: Any) -> str:
    """Return an argument as text; "" for tensors and modules, which repr shows separately."""
    if not (value is None or isinstance(value, str | int | float | tuple) or is_dataclass(value)):
        return ""
    if isinstance(value, tuple) and not all(map(_text, value)):
        return ""
    text = repr(value)
    if " at 0x" in text:  # the default repr of an object: an address
        return ""
    return text


def _check(owner: str, name: str, value: Any, annotation: Any, ours: bool) -> None:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kind, *others = (part.strip() for part in text.split("|"))
    if (
        kind not in ("bool", "int", "float")
        or others not in ([], ["None"])
        or (others and value is None)
    ):
        return
    if kind == "bool":
        check_flag(owner, name, value)
        return
    check_number(owner, name, value, whole=kind == "int")
    if not -FARTHEST < value < FARTHEST and kind == "int":
        raise ValueError(f"{owner}: {name} must be below 2^62, got {value}.")
    if not ours:  # the names may mean something else
        return
    if name in _FROM_ONE:
        check_count(owner, name, value)
    if name == "init_std" and value < 0:
        raise ValueError(f"{owner}: init_std must not be negative, got {value}.")
    if name in _POSITIVE and not value > 0:
        raise ValueError(f"{owner}: {name} must be positive, got {value}.")
