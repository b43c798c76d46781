"""Read what a module says of itself: numbers and flags under known names, in arguments, attributes,
its config and the defaults of its constructor or function."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from posenc.inspect.module.load import FunctionModule
from posenc.inspect.module.subject import Subject, modules_without_containers

_SCALING_PATTERN = re.compile(
    r"scal|(?<!partial_rotary_)factor|alpha|ntk|yarn|interpol|freqs_for|custom", re.I
)
"""Names of scalings. partial_rotary_factor says which share of the channels is rotated."""
_BASE_PATTERN = re.compile(r"base|theta", re.I)
_WORDS_OF_NO_SCALING = ("default", "lang")
"""Values of options with such names that mean RoPE's own frequencies; as 0, 1, None and False."""
_FLAGS_OF_BOTH_SIDES = {
    "bidirectional": True,
    "symmetric": True,
    "causal": False,
    "is_causal": False,
    "is_decoder": False,
}
"""Names of flags by which a module says whether queries see later keys, and the value that says
that they do."""

_BOTH_SIDES_IN_WORDS = re.compile(r"(?<!not )(?<!non-)\b(bidirectional|both directions)\b", re.I)
"""Words of a docstring that say so."""


def stated_numbers(subject: Subject, names: tuple[str, ...]) -> list[float]:
    """Return the numbers that the module states under any of `names`: as an argument of the user;
    if not, as an attribute, in its config, or as a default of its constructor or function."""
    user_values: list[Any] = [
        subject.constructor_arguments[name]
        for name in names
        if name in subject.constructor_arguments
    ]
    if user_values:
        return [float(value) for value in user_values if isinstance(value, int | float)]
    stated_values: list[Any] = []
    for module in modules_without_containers(subject.module):
        stated_values += _values_stated_by_module(module, names)
    function_settings = _settings_of_function(subject.module)
    stated_values += [function_settings[name] for name in names if name in function_settings]
    return [
        float(v) for v in stated_values if isinstance(v, int | float) and not isinstance(v, bool)
    ]


def stated_bases_of_any_name(subject: Subject) -> list[float]:
    """Return the numbers that the module states under names with base or theta in them: a module
    for layers of two kinds, as Gemma 3's, states a base for each."""
    settings = dict(_settings_of_function(subject.module))
    for module in modules_without_containers(subject.module):
        settings |= {p.name: p.default for p in _constructor_parameters(module)}
        settings |= getattr(getattr(module, "config", None), "__dict__", {})
        settings |= vars(module)
    settings |= subject.constructor_arguments
    return [
        float(value)
        for name, value in settings.items()
        if _BASE_PATTERN.search(name)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    ]


def states_scaling(subject: Subject) -> bool:
    """Return True if the module, its config or its arguments state a scaling of frequencies."""
    stated_settings: dict[str, Any] = _settings_of_function(subject.module)
    for module in modules_without_containers(subject.module):
        config = getattr(module, "config", None)
        stated_settings |= {
            p.name: p.default for p in _constructor_parameters(module) if p.default is not p.empty
        }
        stated_settings |= (
            vars(module) | vars(module).get("_buffers", {}) | _rope_parameters(config)
        )
    stated_settings |= subject.constructor_arguments
    if stated_settings.get("rope_type", "default") != "default":
        return True
    scaling_values = [
        value for name, value in stated_settings.items() if _SCALING_PATTERN.search(name)
    ]
    return any(not callable(value) and not _means_no_scaling(value) for value in scaling_values)


def states_both_sides(subject: Subject) -> bool | None:
    """Return True if the module states that a query sees later keys, False if it states that it
    does not, and None if it says neither or both. Where no flag says it, its docstring may.

    A config is not asked: is_decoder is False in configs of decoders, too.
    """
    answers: set[bool] = set()
    for module in modules_without_containers(subject.module):
        settings = {p.name: p.default for p in _constructor_parameters(module)}
        settings |= vars(module)
        answers |= _answers_of_flags(settings)
    answers |= _answers_of_flags(_settings_of_function(subject.module))
    if user_answers := _answers_of_flags(subject.constructor_arguments):
        answers = user_answers
    if not answers and _BOTH_SIDES_IN_WORDS.search(stated_docstrings(subject)):
        return True
    return answers.pop() if len(answers) == 1 else None


def stated_docstrings(subject: Subject) -> str:
    """Return the docstrings of the module's class and of its function, one after the other."""
    described: list[Any] = [subject.module.forward]
    if not isinstance(subject.module, FunctionModule):
        described.insert(0, type(subject.module))
    return " ".join(filter(None, map(inspect.getdoc, described)))


def _answers_of_flags(settings: Mapping[str, Any]) -> set[bool]:
    """Return for each flag of _FLAGS_OF_BOTH_SIDES whether it says that queries see later keys."""
    return {
        settings[name] is value_of_both_sides
        for name, value_of_both_sides in _FLAGS_OF_BOTH_SIDES.items()
        if isinstance(settings.get(name), bool)
    }


def _settings_of_function(module: Any) -> dict[str, Any]:
    """Return what a plain function states: numbers and words that it reads from its file, by their
    names in lower case, and the defaults of its arguments; {} for a module that is none."""
    if not isinstance(module, FunctionModule):
        return {}
    function = module.forward
    global_values = getattr(function, "__globals__", {})
    settings: dict[str, Any] = {}
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        value = global_values.get(name)
        if isinstance(value, int | float | str):
            settings[name.lower()] = value
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not parameter.empty:
            settings[parameter.name] = parameter.default
    return settings


def _values_stated_by_module(module: Any, names: tuple[str, ...]) -> list[Any]:
    """Return the values that one module, or its config, has under any of `names`; if there are
    none, the defaults of such arguments of its constructor."""
    config = getattr(module, "config", None)
    values = []
    for settings in (vars(module), getattr(config, "__dict__", {}), _rope_parameters(config)):
        values += [settings[name] for name in names if name in settings]
    return values or [p.default for p in _constructor_parameters(module) if p.name in names]


def _means_no_scaling(value: Any) -> bool:
    """Return True for a value of an option of scaling that means none: None, 0, 1 or a word."""
    return value is None or (
        isinstance(value, int | float | str) and value in (0, 1, *_WORDS_OF_NO_SCALING)
    )


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Return the dict in which configs of transformers keep base and scaling; {} without one."""
    parameters = getattr(config, "rope_parameters", None)
    return parameters if isinstance(parameters, dict) else {}


def _constructor_parameters(module: Any) -> list[inspect.Parameter]:
    """Return the parameters of the constructor; [] if Python cannot list them."""
    try:
        return list(inspect.signature(type(module).__init__).parameters.values())
    except (TypeError, ValueError):
        return []
