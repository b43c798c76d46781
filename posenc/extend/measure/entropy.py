"""Measure the entropy of attention through transformers' attention interface, without keeping
weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posenc.hf.transformers_compat import arguments_for_next_step

MAX_QUERIES_AT_ONCE = 256
"""Queries at a time."""
MAX_SCORES_AT_ONCE = 1 << 23
"""Scores in memory at once."""
IMPLEMENTATION = "posenc_entropy"
"""The name under which the attention below is registered with transformers."""


@torch.inference_mode()
def attention_entropy(model: Any, tokens: Tensor, *, in_one_piece: bool = False) -> Tensor | None:
    """Return the entropy of each position's attention in nats, (length), the mean over layers and
    heads. None if the model's attention does not go through the interface.

    A sink logit counts as one more key. Tokens are read in pieces through the model's cache, so
    that no mask of length times length is held; `in_one_piece` reads them at once, for models
    without an exact cache.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    tokens = tokens.to(model.device)
    layers: list[Tensor] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention as transformers' interface asks for it, and keep the layer's
        entropy."""
        out, entropy = _attend_with_entropy(module, query, key, value, attention_mask, kwargs)
        layers.append(entropy)
        return out.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        pieces: list[Tensor] = []
        cache: dict[str, Any] = {} if in_one_piece else {"use_cache": True}
        for piece in [tokens] if in_one_piece else tokens.split(MAX_QUERIES_AT_ONCE, dim=1):
            out = model(piece, **cache)
            cache = {} if in_one_piece else arguments_for_next_step(model, out)
            if not layers:
                return None
            pieces.append(torch.stack([layer.float().cpu() for layer in layers]).mean(0))
            layers.clear()
    except ValueError:  # its attention cannot be replaced
        return None
    finally:
        model.set_attn_implementation(before)
    return torch.cat(pieces)


def _attend_with_entropy(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return what transformers' attention returns, (batch, num_heads, rows, head_dim), and the mean
    entropy of each row, (rows). options: the other arguments of its interface."""
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    is_causal = getattr(module, "is_causal", True) and mask is None
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    keys = key.float().mT
    out = torch.empty_like(query[..., : value.shape[-1]])
    entropy = query.new_zeros(query.shape[2], dtype=torch.float32)
    first = key.shape[2] - query.shape[2]  # of the queries, among the keys
    step = max(
        1, min(MAX_QUERIES_AT_ONCE, MAX_SCORES_AT_ONCE // (query.shape[:2].numel() * key.shape[2]))
    )
    for start in range(0, query.shape[2], step):
        rows = slice(start, start + step)
        scores = query[:, :, rows].float() @ keys * scale
        if options.get("softcap") is not None:
            scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
        if mask is not None:
            scores = scores.masked_fill(~_boolean_mask(mask[:, :, rows]), -torch.inf)
        elif is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(~seen.tril(first + start), -torch.inf)
        weights = _append_sinks(scores, options.get("s_aux")).softmax(-1)
        entropy[rows] = torch.special.entr(weights).sum(-1).mean((0, 1))
        out[:, :, rows] = weights[..., : key.shape[2]].to(value.dtype) @ value
    return out, entropy


def _boolean_mask(mask: Tensor) -> Tensor:
    """Return the mask as booleans, True where a query sees a key."""
    if mask.dtype == torch.bool:
        return mask
    return mask == 0  # added to the scores, as in OPT in early releases of transformers 5


def _append_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the scores with the sink logit of each head as one more key at the end."""
    if sinks is None:
        return scores
    sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1)
