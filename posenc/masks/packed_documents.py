"""Bind masks to the order in memory, and refuse masks that show one packed document to another.

Documents packed into one row repeat positions: 0, 1, 2, 0, 1. A causal mask then shows keys of the
first document to queries of the second. A mask is refused if the positions show such a row, and the
mask does not separate documents. Positions are checked where they can be read without waiting for a
device.
"""

from enum import IntEnum

import torch
from jaxtyping import Real
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.masks.mask import PADDING_NAME, Mask
from posenc.positions.tokens import (
    consecutive_positions,
    first_text_returns,
    last_positions_differ,
    positions_restart,
)

_PACKED_DOCUMENTS_MESSAGE = (
    "attention: keys return to earlier positions of their row, as packed documents do, and this "
    "mask, which compares positions, shows one document to another. Use "
    "mask & posenc.masks.document(ids), for example with "
    "ids = posenc.positions.documents_from_positions(positions), or increasing positions."
)

_PACKED_TEXT_MESSAGE = (
    "attention: keys return to the text that begins their row, as packed documents do, and this "
    "mask, which compares the order in memory, shows one document to another. Use "
    "mask & posenc.masks.document(ids), with the number of each token's document."
)

_MEMORY_ORDER_MESSAGE = (
    "attention: with positions of several components a mask compares the order in memory, in which "
    "the queries are the last tokens"
)
_OTHER_POSITIONS_MESSAGE = (
    f"{_MEMORY_ORDER_MESSAGE}, but q_positions are not those of the last keys. Bind the mask to "
    "the places of the tokens in memory, such as mask.bind(range(2, 4), range(6)) for queries 2 "
    "and 3 of 6 keys."
)


def check_documents(mask: Mask) -> None:
    """Raise ValueError if positions show packed documents that a bound mask does not separate."""
    if _possible_leak(mask) is not _OtherDocuments.BY_POSITION:
        return
    assert mask.kv_positions is not None
    if positions_restart(mask.kv_positions, _keys_without_padding(mask)):
        raise ValueError(_PACKED_DOCUMENTS_MESSAGE)


@explain_misfits
def bind_to_memory_order(
    mask: Mask,
    q_positions: Real[Tensor, "*#q_batch q_len axes"],
    kv_positions: Real[Tensor, "*#kv_batch kv_len axes"],
) -> Mask:
    """Return a mask bound to the order in memory, for positions of several components: queries are
    the last tokens. With more queries than keys, the first queries precede all keys.

    Raises: ValueError for a mask that compares positions, if the positions (read on the CPU only,
    and not while tracing) show one of two things:

    - the order in memory is not meant: the last queries have other positions than the last keys;
    - packed documents: the row returns to its first text, and the mask does not separate the two.
    """
    if _compares_positions(mask) and last_positions_differ(q_positions, kv_positions):
        raise ValueError(_OTHER_POSITIONS_MESSAGE)
    leaks_by_position = _possible_leak(mask) is _OtherDocuments.BY_POSITION
    if leaks_by_position and first_text_returns(kv_positions, _keys_without_padding(mask)):
        raise ValueError(_PACKED_TEXT_MESSAGE)
    q_len = q_positions.shape[-2]
    kv_len = kv_positions.shape[-2]
    device = kv_positions.device
    return mask.bind(
        consecutive_positions(kv_len - q_len, q_len, device),
        consecutive_positions(0, kv_len, device),
    )


def _compares_positions(mask: Mask) -> bool:
    """Return True if the mask, or a part of it, compares positions or may do so. A user's own mask
    may do so if it names no tensor."""
    if mask.parts:
        return any(map(_compares_positions, mask.parts))
    if mask.separates_documents is None:
        return False
    return not mask.separates_documents or not mask.captured


class _OtherDocuments(IntEnum):
    """Name the keys of other documents in its row that a query may see by mistake, if the mask does
    not say which documents there are."""

    NONE = 0
    """No key: the mask names documents. This holds for ~document(ids), too, which shows other
    documents on purpose."""
    ANY = 1
    """All keys, or all that are no padding: the mask does not compare positions, so the caller is
    expected to want this."""
    BY_POSITION = 2
    """Keys at the positions of the query's own document, which other documents repeat."""


def _possible_leak(mask: Mask, inverted: bool = False) -> _OtherDocuments:
    """Return which keys of other documents a mask may show to a query by mistake.

    inverted: answer for the inverse ~mask instead.
    """
    if mask.operator == "~":
        return _possible_leak(mask.parts[0], not inverted)
    if not mask.parts:
        # What a mask reads does not change with `inverted`: ~causal compares positions, as causal
        # does, and ~document names documents.
        if mask.separates_documents is None:
            return _OtherDocuments.ANY
        if mask.separates_documents:
            return _OtherDocuments.NONE
        return _OtherDocuments.BY_POSITION
    leaks_of_parts = [_possible_leak(part, inverted) for part in mask.parts]
    if _needs_all_parts(mask, inverted) and _OtherDocuments.NONE in leaks_of_parts:
        return _OtherDocuments.NONE
    return max(leaks_of_parts)


def _keys_without_padding(mask: Mask, inverted: bool = False) -> Tensor | None:
    """Return booleans (batch, kv_len): False for keys that are hidden from all queries because they
    are padding. Return None if the mask hides no padding.

    inverted: answer for the inverse ~mask instead.
    """
    if mask.operator == "~":
        return _keys_without_padding(mask.parts[0], not inverted)
    if not mask.parts:
        valid_tokens = _tensor_of_valid_tokens(mask)
        return ~valid_tokens if inverted and valid_tokens is not None else valid_tokens
    valid_keys_of_parts = [_keys_without_padding(part, inverted) for part in mask.parts]
    valid_keys = [valid for valid in valid_keys_of_parts if valid is not None]
    if _needs_all_parts(mask, inverted):
        return torch.stack(valid_keys).all(0) if valid_keys else None
    # A part without padding shows every key, and so does the union.
    return torch.stack(valid_keys).any(0) if len(valid_keys) == len(valid_keys_of_parts) else None


def _tensor_of_valid_tokens(mask: Mask) -> Tensor | None:
    """Return the tensor (batch, kv_len) that masks.padding reads, True for tokens that are no
    padding, if the mask is of this kind; otherwise None."""
    for captured in mask.captured:
        if captured.name == PADDING_NAME:
            return captured.tensor
    return None


def _needs_all_parts(mask: Mask, inverted: bool) -> bool:
    """Return True if a mask shows a key only where all its parts do, False if one part suffices. If
    `inverted`, answer for the inverse ~mask and its parts ~part: the inverse of a | b is ~a & ~b.
    """
    return (mask.operator == "&") != inverted
