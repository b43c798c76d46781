"""Convert PyTorch's attention masks, in which True or -inf hides a key, to posenc's."""

import torch
from torch import Tensor

from posenc.masks import Mask, causal


def mask_of(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sizes: tuple[int, int, int, int],
    is_causal: bool,
    in_order: bool = True,
) -> Mask | None:
    """Return the mask for `attn_mask` (q_len, kv_len) or (batch * num_heads, q_len, kv_len) and
    `key_padding_mask` (batch, kv_len). With is_causal, attn_mask is assumed to be causal.

    sizes: batch, num_heads, q_len, kv_len. in_order: True if positions grow with the order in
    memory, which is_causal assumes.
    """
    batch, heads, q_len, kv_len = sizes
    found: list[Mask] = []
    if is_causal:
        if q_len != kv_len:
            raise ValueError(f"is_causal needs as many queries as keys, got {q_len} and {kv_len}.")
        found.append(causal if in_order else Mask(lambda sight: sight.q_idx >= sight.kv_idx))
    elif attn_mask is not None:
        seen = ~_hidden("attn_mask", attn_mask)
        if seen.shape == (q_len, kv_len):
            found.append(Mask(lambda sight: seen[sight.q_idx, sight.kv_idx]))
        elif seen.shape == (batch * heads, q_len, kv_len):
            each = seen.view(batch, heads, q_len, kv_len)
            found.append(
                Mask(lambda sight: each[sight.batch, sight.head, sight.q_idx, sight.kv_idx])
            )
        else:
            raise ValueError(
                f"attn_mask must be ({q_len}, {kv_len}) or ({batch * heads}, {q_len}, {kv_len}), "
                f"got {tuple(attn_mask.shape)}."
            )
    if key_padding_mask is not None:
        if key_padding_mask.shape != (batch, kv_len):
            raise ValueError(
                f"key_padding_mask must be ({batch}, {kv_len}), got "
                f"{tuple(key_padding_mask.shape)}."
            )
        real = ~_hidden("key_padding_mask", key_padding_mask)
        found.append(Mask(lambda sight: real[sight.batch, sight.kv_idx]))
    if len(found) == 2:
        return found[0] & found[1]
    return found[0] if found else None


def _hidden(name: str, mask: Tensor) -> Tensor:
    """Convert a mask of bools or of 0 and -inf to bools, True for hidden keys.

    Raises: ValueError, which begins with `name`, for other numbers, which are a bias.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be bool or float, got {mask.dtype}.")
    hidden = mask == -torch.inf
    if not bool((hidden | (mask == 0)).all()):
        raise ValueError(
            f"{name} has numbers other than 0 and -inf: a bias, which would be lost. Pass it as an "
            "encoding, such as posenc.DistanceBias."
        )
    return hidden
