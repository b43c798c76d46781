"""Import somebody else's module or function, and make copies that no call has changed."""

import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from posenc.command_line.errors import one_line
from posenc.encodings import load_object


class FunctionModule(nn.Module):
    """A function as a module; `forward` is the function, so that its arguments keep their names.

    held_modules: the modules among the globals that the function uses, so that .bfloat16() casts
    them, too.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        global_names = getattr(getattr(function, "__code__", None), "co_names", ())
        global_values = getattr(function, "__globals__", {})
        self.held_modules = nn.ModuleList(
            global_values[name]
            for name in global_names
            if isinstance(global_values.get(name), nn.Module)
        )


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse "name=value" arguments: values are JSON, or text where they are not.

    >>> parse_arguments(["dim=64", "layout=half"])
    {'dim': 64, 'layout': 'half'}

    Raises: ValueError for one without a name and an equals sign.
    """
    options: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--arg must be name=value, as in --arg dim=64; got {argument!r}.")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def load_factory(path: str, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """Import "package.module:NAME" or "file.py:NAME", and return a function that makes new copies
    of it.

    A class is built with `options`, and so is a function that makes a module or a function: it is
    called with `options` where there are any. Any other function is taken as it is; its file is run
    again for each copy, because a function may keep state outside. A `config` with a model_type
    becomes that transformers config.

    Raises: ValueError for a path or an argument that does not work.
    """
    imported = import_named(path)
    if isinstance(imported, nn.Module):
        if options:
            raise ValueError(f"{path}: is built already; --arg is for a class.")
        return lambda: copy.deepcopy(imported).eval()
    if isinstance(imported, type) or (options and callable(imported)):
        return lambda: _build_module(path, imported, options)
    if not callable(imported):
        raise ValueError(
            f"{path}: must be a class, a module or a function, not {_type_in_words(imported)}."
        )
    return lambda: FunctionModule(_import_again(path)).eval()


def import_named(path: str) -> Any:
    """Import "package.module:NAME", or "file.py:NAME" with or without quotes around the file.

    Raises: ValueError with the reason.
    """
    source, colon, attribute = path.rpartition(":")
    if not colon:
        raise ValueError(f"{path!r}: name a class or function, as in file.py:NAME or package:NAME.")
    try:
        return load_object(source.strip("'\""), attribute)
    except (ValueError, AttributeError) as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{path}: cannot be imported ({reason}).") from error


def _import_again(path: str) -> Any:
    """Import the function once more. A file is executed again, so that its globals are as new; a
    package is not."""
    if path.rpartition(":")[0].strip("'\"").endswith(".py"):
        sys.modules.pop(import_named(path).__module__, None)
    with _fixed_seed():
        return import_named(path)


@contextmanager
def _fixed_seed() -> Iterator[None]:
    """Seed torch with 0 inside the block, so that all copies get the same weights; restore its
    random state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _build_module(
    path: str, constructor: Callable[..., Any], options: Mapping[str, Any]
) -> nn.Module:
    """Call the constructor with the options, and return the module that it makes, in evaluation
    mode.

    Raises: ValueError for arguments that it refuses, or if it makes no module or function.
    """
    try:
        with _fixed_seed():
            built = constructor(**_with_transformers_config(options))
    except Exception as error:  # a foreign constructor: any exception is its refusal
        raise ValueError(
            f"{path}: refuses these arguments: {one_line(error).rstrip('.')}. It takes "
            f"{_signature_in_words(constructor)}; give each as --arg name=value."
        ) from error
    if isinstance(built, nn.Module):
        return built.eval()
    if callable(built):
        return FunctionModule(built).eval()
    raise ValueError(
        f"{path}: must make a torch module or a function, made {_type_in_words(built)}. "
        "What is called at each position takes no --arg."
    )


def _with_transformers_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options; a `config` that is a dict with a model_type becomes the config object of
    transformers."""
    config = options.get("config")
    if not isinstance(config, dict) or "model_type" not in config:
        return dict(options)
    from transformers import AutoConfig

    fields = {name: value for name, value in config.items() if name != "model_type"}
    return {**options, "config": AutoConfig.for_model(config["model_type"], **fields)}


def _type_in_words(value: Any) -> str:
    """Return the type of an object with its article: "a Linear"."""
    return f"a {type(value).__name__}"


def _signature_in_words(constructor: Any) -> str:
    """Return the signature of a constructor, for a message: "(dim, base=10000)"."""
    try:
        return str(inspect.signature(constructor))
    except (TypeError, ValueError):
        return "arguments that Python cannot list"
