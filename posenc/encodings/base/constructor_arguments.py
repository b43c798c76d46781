"""Check and record the arguments of an encoding's constructor, to print and to compare them."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

from torch import nn

from posenc.arguments import (
    FARTHEST_POSITION,
    check_count,
    check_flag,
    check_number,
    describe_misfit,
    replacement_for,
)

_NAMES_OF_SIZES = (
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_width",
    "max_positions",
    "max_distance",
    "clamp_len",
    "extent",
    "num_profiles",
    "floor_scale",
)
"""Names of arguments that are at least 1 in all encodings of posenc.

Listed by name, so that no constructor repeats the check. Left out are sizes that may be 0, and
those that a class checks itself.
"""
_NAMES_OF_POSITIVE_NUMBERS = (
    "base",
    "rope_theta",
    "init_L",
    "bias_max",
    "partial_rotary_factor",
    "scale_base",
)
"""Names of arguments that are above 0 in all encodings of posenc."""


class UnknownOption(ValueError):
    """Report options that an encoding does not have.

    name: the first of these options in alphabetical order. accepted: the options that the encoding
    has.
    """

    def __init__(self, caller: str, options: Iterable[str], accepted: Iterable[str]) -> None:
        self.accepted = tuple(accepted)
        unknown_options = sorted(set(options) - set(self.accepted))
        self.name = unknown_options[0]
        replacement = replacement_for(self.name, self.accepted)
        hint = f" Did you mean {replacement.removesuffix('=')!r}?" if replacement else ""
        super().__init__(
            f"{caller}: unknown option {', '.join(unknown_options)}; "
            f"it takes {', '.join(self.accepted) or 'none'}.{hint}"
        )


def with_checked_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Return `init`, a constructor, wrapped so that it first checks its arguments and records them.

    The wrapper raises TypeError for an argument that does not match its annotation bool, int or
    float (or None), and ValueError for NaN and infinity.
    """
    signature = inspect.signature(init)
    is_posenc_class = init.__module__.startswith("posenc.")

    @functools.wraps(init)
    def check_and_init(*args: Any, **kwargs: Any) -> None:
        """Check and record the arguments, the first of which is the encoding itself, and call
        `init`."""
        try:
            bound_arguments = signature.bind(*args, **kwargs)
        except TypeError:
            raise TypeError(describe_misfit(init, args, kwargs)) from None
        encoding = args[0]
        caller = type(encoding).__name__
        arguments_with_self = dict(bound_arguments.arguments)
        _record_arguments(encoding, bound_arguments)
        for name, value in arguments_with_self.items():
            _check_argument(
                caller, name, value, signature.parameters[name].annotation, is_posenc_class
            )
        attribute_error = None
        try:
            init(*args, **kwargs)
        except AttributeError as error:  # torch's, if super().__init__() was not called
            attribute_error = error
        if "_parameters" not in vars(encoding):
            raise TypeError(
                f"{caller}: __init__ must call super().__init__() first."
            ) from attribute_error
        if attribute_error is not None:
            raise attribute_error
        # Overwritten by the constructors of subclasses: the outermost one's are all.
        vars(encoding)["_attribute_names"] = tuple(vars(encoding))

    return check_and_init


def _record_arguments(encoding: Any, bound_arguments: inspect.BoundArguments) -> None:
    """Store the arguments of a constructor on the encoding, in three forms. If constructors call
    one another, those of the first call are kept.

    _explicit_arguments: as they were given, without defaults, to be saved in files.
    _comparable_arguments: with defaults, in a form that compares equal, for `are_alike`.
    _argument_texts: as texts, for `arguments_in_repr`.
    """
    arguments_with_self = dict(bound_arguments.arguments)
    arguments_without_self = dict(list(arguments_with_self.items())[1:])
    vars(encoding).setdefault("_explicit_arguments", arguments_without_self)
    bound_arguments.apply_defaults()
    comparable_arguments = {
        name: _comparable_form(v) for name, v in list(bound_arguments.arguments.items())[1:]
    }
    vars(encoding).setdefault("_comparable_arguments", comparable_arguments)
    argument_texts = {
        name: text for name, value in arguments_with_self.items() if (text := _short_text(value))
    }
    vars(encoding).setdefault("_argument_texts", argument_texts)


def are_alike(a: nn.Module, b: nn.Module) -> bool:
    """Return True if two encodings, and their submodules, are of the same classes and were built
    with equal arguments; their weights may differ."""
    attributes_a = a.__dict__
    attributes_b = b.__dict__
    arguments_a = attributes_a.get("_comparable_arguments")
    arguments_b = attributes_b.get("_comparable_arguments")
    # Both are the same objects if one encoding is a shallow copy of the other.
    if arguments_a is arguments_b and attributes_a["_modules"] is attributes_b["_modules"]:
        return type(a) is type(b)
    return classes_and_arguments(a) == classes_and_arguments(b)


def repr_in_one_line(encoding: nn.Module) -> str:
    """Return repr(encoding) in one line, for messages."""
    return " ".join(str(encoding).split())


def classes_and_arguments(encoding: nn.Module) -> tuple[Any, ...]:
    """Return the class and the arguments of each module of an encoding, to compare encodings. If an
    argument is also an attribute, the attribute's value is taken, because a computed default
    replaces None."""
    descriptions = []
    for module in encoding.modules():
        recorded_arguments = vars(module).get("_comparable_arguments", {})
        arguments = (
            _comparable_form(vars(module).get(name, passed_value))
            for name, passed_value in recorded_arguments.items()
        )
        descriptions.append((type(module), *arguments))
    return tuple(descriptions)


def _comparable_form(value: Any) -> Any:
    """Return an argument in a form in which equal ones compare equal: 10000 and 10000.0 become the
    same, also within a tuple or a scaling."""
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, tuple):
        return tuple(map(_comparable_form, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_comparable_form(getattr(value, f.name)) for f in fields(value))
    return _argument_text(value)


def arguments_in_repr(encoding: Any) -> str:
    """Return the text between the parentheses in repr(encoding): the arguments that differ from
    their defaults, and in any case rope_theta, base and scaling."""
    shown_arguments = []
    for name, parameter in inspect.signature(type(encoding)).parameters.items():
        passed_or_default_text = getattr(encoding, "_argument_texts", {}).get(name) or _short_text(
            parameter.default
        )
        # An attribute counts, because a computed default replaces None.
        text = (
            _short_text(vars(encoding)[name]) if name in vars(encoding) else passed_or_default_text
        )
        is_required = parameter.default is parameter.empty
        is_not_default = is_required or text != _short_text(parameter.default)
        if text and (is_not_default or name in _ALWAYS_SHOWN):
            shown_arguments.append(f"{name}={text}")
    return ", ".join(shown_arguments)


_ALWAYS_SHOWN = ("rope_theta", "base", "scaling")
_MAX_CHARACTERS = 200
"""Maximum number of characters that repr shows of one argument; a list of frequencies can have
thousands."""


def _short_text(value: Any) -> str:
    """Return an argument as text of at most _MAX_CHARACTERS characters."""
    text = _argument_text(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


def _argument_text(value: Any) -> str:
    """Return an argument as text; "" for tensors and modules, which repr shows separately."""
    is_shown = value is None or isinstance(value, str | int | float | tuple)
    if not is_shown and not is_dataclass(value):
        return ""
    if isinstance(value, tuple) and not all(map(_argument_text, value)):
        return ""
    text = repr(value)
    if " at 0x" in text:  # the default repr of an object: an address
        return ""
    return text


def _check_argument(
    caller: str, name: str, value: Any, annotation: Any, is_posenc_class: bool
) -> None:
    """Raise TypeError or ValueError for an argument that does not match its annotation, if that is
    bool, int or float, or one of them and None.

    is_posenc_class: True if the constructor is one of posenc's, in which the name of an argument
    also decides its range.
    """
    annotation_text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    type_name, *other_type_names = (part.strip() for part in annotation_text.split("|"))
    accepts_none = other_type_names == ["None"]
    if type_name not in ("bool", "int", "float") or (other_type_names and not accepts_none):
        return
    if accepts_none and value is None:
        return
    if type_name == "bool":
        check_flag(caller, name, value)
        return
    check_number(caller, name, value, whole=type_name == "int")
    if type_name == "int" and not -FARTHEST_POSITION < value < FARTHEST_POSITION:
        raise ValueError(f"{caller}: {name} must be below 2^62, got {value}.")
    if is_posenc_class:
        _check_range_of_argument(caller, name, value)


def _check_range_of_argument(caller: str, name: str, value: float) -> None:
    """Raise ValueError for a size below 1, a negative init_std or a base that is not positive.
    `name` decides which of these the argument is."""
    if name in _NAMES_OF_SIZES:
        check_count(caller, name, value)
    if name == "init_std" and value < 0:
        raise ValueError(f"{caller}: init_std must not be negative, got {value}.")
    if name in _NAMES_OF_POSITIVE_NUMBERS and not value > 0:
        raise ValueError(f"{caller}: {name} must be positive, got {value}.")
