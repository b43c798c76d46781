"""Tell the texts of packed rows apart, and refuse rows and steps in which they would mix."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.hf.attachment.forward_context import RunningForward
from posenc.hf.transformers_compat import counts_chunks_per_text
from posenc.positions.tokens import first_text_returns


def mask_of_text_beginnings(positions: Tensor, valid: Tensor) -> Tensor:
    """Return a mask that is True for each token that begins another text than the last valid token
    before it in its row.

    With whole positions a text continues where the position grows by one, or by the distance to
    that token in the row: 0 1 pad 2 and 0 1 pad 3 are one text. With fractional positions it
    continues unless the position falls.

    Shapes: positions (len) or (#batch, len), valid (#batch, len) -> (batch, len). Padding never
    begins a text, whatever its positions are.
    """
    positions, valid = torch.broadcast_tensors(positions, valid)
    indices = torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape)
    last_valid_index = indices.where(valid, -1).cummax(dim=-1).values
    previous_index = F.pad(last_valid_index[:, :-1], (1, 0), value=-1)
    steps = positions - positions.gather(-1, previous_index.clamp(min=0))
    goes_on = (steps == 1) | (steps == indices - previous_index)
    if positions.is_floating_point():
        goes_on = steps >= 0
    return valid & (previous_index >= 0) & ~goes_on


def document_numbers(token_numbers: Tensor, mask: Any) -> Tensor | None:
    """Return the document of each token in packed rows, counted from 0: (batch, len), or (len) if
    all rows are equal.

    None if each row is one document. None, too, if the mask is no tensor of two dimensions: then
    the mask itself says what each token sees.

    token_numbers: the number of each token in its text. mask: the caller's attention_mask.
    """
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        return None
    valid = valid_token_mask(mask, token_numbers.shape[-1], token_numbers.device)
    is_beginning = mask_of_text_beginnings(token_numbers, valid)
    document_of_token = is_beginning.cumsum(dim=-1)
    if mask is not None and torch.compiler.is_compiling():
        return document_of_token  # reading them would break the graph
    return drop_equal_rows(document_of_token) if bool(is_beginning.any()) else None


def valid_token_mask(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return True for each of `length` tokens that is no padding, (#batch, length), by a padding
    mask (batch, len). All are valid without a mask, or with one of fewer tokens."""
    if mask is None or mask.shape[-1] < length:
        return torch.ones(1, length, dtype=torch.bool, device=device)
    return (mask[:, :length] != 0).to(device)


def refuse_another_text(
    position_ids: Tensor,
    token_numbers: Tensor | None,
    cached_numbers: Tensor | None,
    mask: Any,
    num_cached: int,
) -> None:
    """Raise ValueError if new tokens and those of a cache are not one text: a new token begins
    another one, see `mask_of_text_beginnings`, or the cache holds several.

    Without token_numbers the positions have several components, and tokens may share one (those of
    an image do); but only the first token of a text has 0 on all axes.

    Args:
        position_ids: positions of the new tokens.
        token_numbers: the number of each new token in its text, if it is known.
        cached_numbers: the numbers of cached tokens, of the last ones if a window forgets; None:
            they are counted from 0.
        mask: attention_mask; one of four dimensions says itself what each token sees.
        num_cached: tokens of a row that the cache has seen, with padding and forgotten ones.
    """
    # A compiled step is not checked: reading numbers would break its graph.
    if torch.compiler.is_compiling():
        return
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        return
    num_new = position_ids.shape[-1]
    valid = valid_token_mask(mask, num_cached + num_new, position_ids.device)
    if token_numbers is None:
        is_beginning = (
            (position_ids == 0).all(dim=0)
            & valid[:, num_cached:]
            & valid[:, :num_cached].any(-1, keepdim=True)
        )
    else:
        if cached_numbers is None:
            cached_numbers = valid[:, :num_cached].cumsum(dim=-1) - 1
        # Either may have one row that stands for all rows of the batch.
        num_rows = max(
            len(cached_numbers), token_numbers.shape[0] if token_numbers.ndim == 2 else 1
        )
        numbers_of_both = [
            cached_numbers.to(position_ids.device).expand(num_rows, -1),
            token_numbers.expand(num_rows, num_new),
        ]
        num_compared = cached_numbers.shape[1] + num_new
        is_beginning = mask_of_text_beginnings(
            torch.cat(numbers_of_both, dim=1), valid[:, -num_compared:]
        )
    if not bool(is_beginning.any()):
        return
    raise ValueError(
        "posenc: the position_ids of the new tokens do not go on with the "
        f"{num_cached} tokens that the "
        "cache holds: one of them begins another text, or the cache holds several texts. Read each "
        "text with a cache of its own, or all texts of a row in one call, or hand an "
        "attention_mask of four dimensions that says what each token sees."
    )


def refuse_packed_text(position_ids: Tensor, mask: Any) -> None:
    """Raise ValueError if positions of several components, (axes, batch, len), show that a row has
    several texts, by returning to where its first text is. Positions of one component pass: they
    tell texts apart."""
    if position_ids.ndim != 3:
        return
    valid = (
        mask.bool() if isinstance(mask, Tensor) and mask.shape == position_ids.shape[1:] else None
    )
    if first_text_returns(position_ids.movedim(0, -1), valid):
        num_axes = len(position_ids)
        raise ValueError(
            f"posenc: position_ids of {num_axes} components return to the text that begins their "
            "row, as packed texts do, and only a number for each token says where a text ends. Put "
            f"it before the components: position_ids of shape ({num_axes + 1}, batch, len), whose "
            "first entry counts from 0 in each text."
        )


def refuse_mixed_texts(stack: nn.Module, document_of_token: Tensor) -> None:
    """Raise ValueError for packed rows of several texts in a stack whose layers hand one text on to
    the next. document_of_token: the document of each token."""
    if not bool((document_of_token > 0).any()):  # a compiled forward always numbers documents
        return
    raise ValueError(
        f"posenc: {type(stack).__name__} has layers that are no attention, and they hand one text "
        "of a packed row on to the next, as they do without posenc. Call the model with one text "
        "in a row."
    )


def refuse_chunked_attention_in_packed_rows(
    module: nn.Module, running_forward: RunningForward, length: int, has_cache: bool
) -> None:
    """Raise ValueError if attention works in chunks and may cut the texts of a packed row wrongly.

    Without a cache and a mask newer transformers counts the chunks of Llama 4 in each text;
    otherwise it counts them in the row, where a chunk may begin in the middle of a text. A row of
    `length` tokens that fits into one chunk passes.
    """
    chunk_size = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if running_forward.document_of_token is None or chunk_size is None or length <= chunk_size:
        return
    has_several_texts = bool((running_forward.document_of_token > 0).any())
    if not has_several_texts:  # a compiled forward always numbers documents
        return
    case_in_words = "This transformers"
    cure = "Call the model with one text in a row."
    if counts_chunks_per_text():
        if not has_cache and not running_forward.has_mask:
            return
        case_in_words = "With a cache or an attention_mask transformers"
        cure = "Call the model with use_cache=False and without attention_mask."
    raise ValueError(
        f"posenc: {type(module).__name__} attends in chunks of {chunk_size} tokens. "
        f"{case_in_words} counts them in the whole row, and this row of {length} tokens has "
        f"several texts. {cure}"
    )


def drop_equal_rows(position_ids: Tensor) -> Tensor:
    """Return position_ids (batch, len) as (len) if all rows are known to be equal, else
    unchanged."""
    is_on_cpu = position_ids.device.type == "cpu"
    if position_ids.ndim == 2 and (
        position_ids.shape[0] == 1 or (is_on_cpu and bool((position_ids == position_ids[:1]).all()))
    ):
        return position_ids[0].contiguous()
    return position_ids
