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

from posenc.encodings import load_object
from posenc.report.page.failure import one_line


class Function(nn.Module):
    """A function as a module; `forward` is the function, so that its arguments keep their names.

    held: the modules among the globals that the function names, so that a cast reaches them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        known = getattr(function, "__globals__", {})
        self.held = nn.ModuleList(
            known[name] for name in names if isinstance(known.get(name), nn.Module)
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


def load(path: str, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """Import "package.module:NAME" or "file.py:NAME", and return a maker of fresh copies.

    A class is built with `options`, and so is a function that makes a module or a function: it is
    called with `options` where there are any. Any other function is taken as it is; its file is run
    again for each copy, because a function may keep state outside. A `config` with a model_type
    becomes that transformers config.

    Raises: ValueError for a path or an argument that does not work.
    """
    named = imported(path)
    if isinstance(named, nn.Module):
        if options:
            raise ValueError(f"{path}: is built already; --arg is for a class.")
        return lambda: copy.deepcopy(named).eval()
    if isinstance(named, type) or (options and callable(named)):
        return lambda: _built(path, named, options)
    if not callable(named):
        raise ValueError(f"{path}: must be a class, a module or a function, not {_kind_of(named)}.")
    return lambda: Function(_run_again(path)).eval()


def imported(path: str) -> Any:
    """Import "package.module:NAME", or "file.py:NAME" with or without quotes around the file.

    Raises: ValueError with the reason.
    """
    where, colon, attribute = path.rpartition(":")
    if not colon:
        raise ValueError(f"{path!r}: name a class or function, as in file.py:NAME or package:NAME.")
    try:
        return load_object(where.strip("'\""), attribute)
    except (ValueError, AttributeError) as error:
        why = str(error).rstrip(".")
        raise ValueError(f"{path}: cannot be imported ({why}).") from error


def _run_again(path: str) -> Any:
    """Import the function again; a file is run again, a package is not."""
    if path.rpartition(":")[0].strip("'\"").endswith(".py"):
        sys.modules.pop(imported(path).__module__, None)
    with _same_weights():
        return imported(path)


@contextmanager
def _same_weights() -> Iterator[None]:
    """Draw the same random numbers as for every other copy, and leave those of calls as they
    are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _built(path: str, made_by: Callable[..., Any], options: Mapping[str, Any]) -> nn.Module:
    """Build the module, in evaluation mode. Raises: ValueError for arguments that it refuses."""
    try:
        with _same_weights():
            built = made_by(**_with_config(options))
    except Exception as error:  # a foreign constructor: any exception is its refusal
        raise ValueError(
            f"{path}: refuses these arguments: {one_line(error).rstrip('.')}. It takes "
            f"{_parameters(made_by)}; give each as --arg name=value."
        ) from error
    if isinstance(built, nn.Module):
        return built.eval()
    if callable(built):
        return Function(built).eval()
    raise ValueError(
        f"{path}: must make a torch module or a function, made {_kind_of(built)}. "
        "What is called at each position takes no --arg."
    )


def _with_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make transformers' config object of a config that is given as a dict with a model_type."""
    config = options.get("config")
    if not isinstance(config, dict) or "model_type" not in config:
        return dict(options)
    from transformers import AutoConfig

    fields = {name: value for name, value in config.items() if name != "model_type"}
    return {**options, "config": AutoConfig.for_model(config["model_type"], **fields)}


def _kind_of(thing: Any) -> str:
    """Return the type of a thing in words: "a Linear"."""
    return f"a {type(thing).__name__}"


def _parameters(made_by: Any) -> str:
    """Return the signature of what makes the module, for a message."""
    try:
        return str(inspect.signature(made_by))
    except (TypeError, ValueError):
        return "arguments that Python cannot list"
