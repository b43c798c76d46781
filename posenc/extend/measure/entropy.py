"""Measure the entropy of attention through transformers' attention interface, without keeping
weights."""

from typing import Any

import torch
from torch import Tensor, nn

from posenc.hf.capabilities import continued

BLOCK = 256
"""Queries at a time."""
SCORES_BUDGET = 1 << 23
"""Scores in memory at once."""


@torch.inference_mode()
def attention_entropy(model: Any, tokens: Tensor, *, whole: bool = False) -> Tensor | None:
    """Return the mean entropy, in nats, of each position's attention over layers and heads,
    (length). None if the model's attention does not go through the interface.

    A sink logit counts as one more key. Tokens are read in pieces through the model's cache, so
    that no mask of length times length is held; `whole` reads them at once, for models without an
    exact cache.
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
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        causal = getattr(module, "is_causal", True) and attention_mask is None
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        keys = key.float().mT
        out = torch.empty_like(query[..., : value.shape[-1]])
        entropy = query.new_zeros(query.shape[2], dtype=torch.float32)
        first = key.shape[2] - query.shape[2]
        step = max(1, min(BLOCK, SCORES_BUDGET // (query.shape[:2].numel() * key.shape[2])))
        for start in range(0, query.shape[2], step):
            rows = slice(start, start + step)
            scores = query[:, :, rows].float() @ keys * scale
            if kwargs.get("softcap") is not None:
                scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
            if attention_mask is not None:
                mask = attention_mask[:, :, rows]
                if mask.dtype != torch.bool:  # OPT's, in early releases of transformers 5
                    mask = mask == 0
                scores = scores.masked_fill(~mask, -torch.inf)
            elif causal:
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
                scores = scores.masked_fill(~seen.tril(first + start), -torch.inf)
            if (sinks := kwargs.get("s_aux")) is not None:
                sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(-1)
            entropy[rows] = torch.special.entr(weights).sum(-1).mean((0, 1))
            out[:, :, rows] = weights[..., : key.shape[2]].to(value.dtype) @ value
        layers.append(entropy)
        return out.transpose(1, 2).contiguous(), None

    name, before = "posenc_entropy", model.config._attn_implementation
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        model.set_attn_implementation(name)
        pieces: list[Tensor] = []
        cache: dict[str, Any] = {} if whole else {"use_cache": True}
        for piece in [tokens] if whole else tokens.split(BLOCK, dim=1):
            out = model(piece, **cache)
            cache = {} if whole else continued(model, out)
            if not layers:
                return None
            pieces.append(torch.stack([layer.float().cpu() for layer in layers]).mean(0))
            layers.clear()
    except ValueError:  # its attention cannot be replaced
        return None
    finally:
        model.set_attn_implementation(before)
    return torch.cat(pieces)
