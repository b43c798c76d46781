"""Import a foreign module and build it from `package.module:Class` and `name=value`."""

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posenc.encodings import find
from posenc.report.page.failure import one_line

SCORE_MOD = 5
"""Arguments of a FlexAttention score_mod: score, batch, head, query index, key index."""
HEAD_NAMES = ("num_heads", "heads", "H", "n_heads", "num_attention_heads")


class Function(nn.Module):
    """A function as a module; `forward` is the function, so that its arguments keep their names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class ScoreMod(nn.Module):
    """Apply a FlexAttention score_mod to zero scores: (num_heads, q_len, kv_len)."""

    def __init__(self, score_mod: Callable[..., Any], num_heads: int) -> None:
        super().__init__()
        self.score_mod, self.num_heads = score_mod, num_heads

    def forward(self, q_len: int, kv_len: int, dtype: torch.dtype) -> Tensor:
        heads = torch.arange(self.num_heads)[:, None, None]
        q_idx = torch.arange(kv_len - q_len, kv_len)[:, None]
        zero = torch.zeros(self.num_heads, q_len, kv_len, dtype=dtype)
        return self.score_mod(zero, torch.tensor(0), heads, q_idx, torch.arange(kv_len))


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


def build(path: str, arguments: Sequence[str] = ()) -> nn.Module:
    """Import "package.module:Class" or "file.py:Class" and build it with "name=value" arguments.

    A `config` with a model_type becomes that transformers config. A function is called if it needs
    no further arguments; a score_mod becomes a bias.

    Raises: ValueError for a path or an argument that does not work.
    """
    made_by = imported(path)
    options = parse_arguments(arguments)
    if isinstance(options.get("config"), dict) and "model_type" in options["config"]:
        from transformers import AutoConfig

        config = dict(options["config"])
        options["config"] = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    if isinstance(made_by, nn.Module) or _is_score_mod(made_by):
        made = made_by
    else:
        try:
            if inspect.isfunction(made_by) and (_required(made_by) - options.keys()):
                inspect.signature(made_by).bind_partial(**options)
                made = partial(made_by, **options) if options else made_by
            else:
                made = made_by(**options)
        except Exception as error:  # a foreign constructor: any exception is its refusal
            raise ValueError(
                f"{path}: refuses these arguments: {one_line(error).rstrip('.')}. It takes "
                f"{_parameters(made_by)}; give each as --arg name=value."
            ) from error
    return _as_module(made, path, options).eval()


def imported(path: str) -> Any:
    """Import "package.module:Class", or "file.py:Class" with or without quotes around the file.

    Raises: ValueError with the reason.
    """
    where, _, attribute = path.rpartition(":")
    try:
        return find(where.strip("'\""), attribute)
    except (ValueError, AttributeError) as error:
        why = str(error).rstrip(".")
        raise ValueError(f"{path}: cannot be imported ({why}).") from error


def _as_module(made: Any, path: str, options: dict[str, Any]) -> nn.Module:
    if isinstance(made, nn.Module):
        return made
    if not callable(made):
        raise ValueError(
            f"{path}: must make a torch module or a function, made a {type(made).__name__}; leave "
            "out the arguments that say how many positions there are."
        )
    if _is_score_mod(made):
        heads = next(
            (options[name] for name in HEAD_NAMES if isinstance(options.get(name), int)), 8
        )
        return ScoreMod(made, heads)
    return Function(made)


def _required(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments without a default."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in kinds}


def _is_score_mod(made: Any) -> bool:
    return inspect.isfunction(made) and len(_required(made)) == SCORE_MOD


def _parameters(made_by: Any) -> str:
    try:
        return str(inspect.signature(made_by))
    except (TypeError, ValueError):
        return "arguments that Python cannot list"
