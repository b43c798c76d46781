"""The same weights without their positions: rotations by nothing, empty tables, no bias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from posenc.hf.attachment.own_positions import no_turn
from posenc.inspect.checkpoint.positions import DISENTANGLED, TABLE_NAMES

ALIBI_ARGUMENTS = {"BloomAttention": "alibi", "MptAttention": "position_bias"}
"""By which argument the attention of a layer is given its bias."""


@contextmanager
def without_positions(model: nn.Module) -> Iterator[list[str]]:
    """Inside the block the model is blind to order but for its mask; yields what was removed.

    Rotations become the identity, rows of tables and T5's biases zero, ALiBi's and DeBERTa's terms
    of the scores zero. Everything is as before after the block.
    """
    removed: list[str] = []
    with ExitStack() as undo:
        for path, module in model.named_modules():
            if what := _remove(path, module, undo):
                removed.append(what)
        yield removed


def _remove(path: str, module: nn.Module, undo: ExitStack) -> str | None:
    """Silence one module until `undo` runs; says what it was, None for one without positions."""
    name = path.rpartition(".")[2]
    if "RotaryEmbedding" in type(module).__name__:
        hook = module.register_forward_hook(_still)
        undo.callback(hook.remove)
        return f"the rotation {path}"
    if isinstance(module, nn.Embedding) and name in (*TABLE_NAMES, "relative_attention_bias"):
        kept = module.weight.detach().clone()
        _fill(module.weight, torch.zeros_like(kept))
        undo.callback(_fill, module.weight, kept)
        return f"the table {path}"
    sines = getattr(module, "embed_positions", None)
    if isinstance(sines, torch.Tensor):  # GPT-J and CodeGen: sines, then cosines
        half = sines.shape[-1] // 2
        module.embed_positions = torch.tensor([0.0, 1.0]).repeat_interleave(half).expand_as(sines)
        undo.callback(setattr, module, "embed_positions", sines)
        return f"the rotation of {path}"
    if argument := ALIBI_ARGUMENTS.get(type(module).__name__):
        hook = module.register_forward_pre_hook(partial(_no_bias, argument), with_kwargs=True)
        undo.callback(hook.remove)
        return f"the bias of {path}"
    for method in DISENTANGLED:
        if hasattr(module, method):
            setattr(module, method, _zeros(getattr(module, method)))
            undo.callback(delattr, module, method)
            return f"the bias of {path}"
    return None


def _still(module: nn.Module, inputs: Any, turn: Any) -> Any:
    return no_turn(turn)


def _no_bias(argument: str, module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
    return inputs, {**named, argument: torch.zeros_like(named[argument])}


def _zeros(method: Any) -> Any:
    return lambda *args, **kwargs: torch.zeros_like(method(*args, **kwargs))


@torch.no_grad()
def _fill(weight: torch.Tensor, values: torch.Tensor) -> None:
    weight.copy_(values)
