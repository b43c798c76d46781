"""T5 and BLOOM as transformers has them, with their biases computed by posenc where they are used:
no bias is written out, and memory grows with the length, not with its square."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.hf.attention import NAME, attend, register_attention
from posenc.scores.alibi import ALiBi
from posenc.scores.t5 import T5Bias


@contextmanager
def own_biases(model: Any) -> Iterator[nn.Module]:
    """The model on posenc's attention inside the block, with the same answers.

    T5's table is shared, so that it goes on learning. BLOOM's distances count tokens, which is its
    own rule wherever padding stands at one end.

    Raises: ValueError for a model that is neither.
    """
    register_attention()
    kind = model.config.model_type
    if kind == "t5":
        changes = _t5_changes(model)
    elif kind == "bloom":
        changes = _bloom_changes(model)
    else:
        raise ValueError(f"own_biases knows t5 and bloom, got a {kind} model.")
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [config._attn_implementation for config in configs]
    saved = [{name: vars(m)[name] for name in new if name in vars(m)} for m, new in changes]
    try:
        for config in configs:
            config._attn_implementation = NAME
        for module, new in changes:
            vars(module).update(new)  # past nn.Module's bookkeeping: no second owner of the table
        yield model
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        for (module, new), old in zip(changes, saved, strict=True):
            for name in new:
                del vars(module)[name]
            vars(module).update(old)


def _t5_changes(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Attributes for every attention: its encoding, and a bias that is never computed."""
    # Each layer hands the bias to the next: an empty one says that there is one.
    empty = torch.empty(0)
    nothing = {"has_relative_attention_bias": True, "compute_bias": lambda *a, **k: empty}
    changes: list[tuple[nn.Module, dict[str, Any]]] = []
    for stack in model.modules():
        blocks: Any = getattr(stack, "block", None)
        if blocks is None:
            continue
        first = blocks[0].layer[0].SelfAttention
        encoding = T5Bias(
            first.n_heads,
            bidirectional=not first.is_decoder,
            num_buckets=first.relative_attention_num_buckets,
            max_distance=first.relative_attention_max_distance,
        )
        encoding.weight = first.relative_attention_bias.weight
        for block in blocks:
            changes.append((block.layer[0].SelfAttention, {**nothing, "posenc_encoding": encoding}))
            if first.is_decoder:
                changes.append((block.layer[1].EncDecAttention, dict(nothing)))
    return changes


def _bloom_changes(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    attentions: list[Any] = [m for m in model.modules() if type(m).__name__ == "BloomAttention"]
    return [
        (m, {"posenc_encoding": ALiBi(m.num_heads), "forward": partial(_bloom_attention, m)})
        for m in attentions
    ]


def _bloom_attention(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """BLOOM's attention, whose scores do not go through transformers' interface."""
    if output_attentions:
        raise ValueError("posenc attention keeps no weights to show: output_attentions is off.")
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    dropout = module.attention_dropout.p
    out, _ = attend(
        module, query, key, value, attention_mask, dropout, scaling=module.inv_norm_factor
    )
    out = F.dropout(module.dense(out.flatten(2)), module.hidden_dropout, module.training)
    return out + residual, None
