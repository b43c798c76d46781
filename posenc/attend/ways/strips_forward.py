"""Attend with a bias by distance, by strips of queries: the forward pass."""

from typing import NamedTuple

from torch import Tensor

from posenc.attend.ways import flash

SHORT_BYTES = 2 * 2**20
"""Maximum size of a bias that is materialized if there is only one strip, because torch's kernel
reads it faster than a view."""


class Strip(NamedTuple):
    """Select queries [start, stop) and a range of keys [first, last) with all that they may see."""

    start: int
    stop: int
    first: int
    last: int


def reversed_bias(row: Tensor, q_len: int, strip: Strip) -> Tensor:
    """Return the bias (1, num_heads, rows, keys) of a strip with queries in reverse order, as a
    view of the row (num_heads, q_len + kv_len - 1)."""
    start, stop, first, last = strip
    shape = (1, row.shape[0], stop - start, last - first)
    offset = row.storage_offset() + q_len - stop + first
    return row.as_strided(shape, (0, row.stride(0), 1, 1), offset)


class Group(NamedTuple):
    """Collect strips of consecutive queries. `shared`: keys that all see; None if too few."""

    strips: list[Strip]
    shared: Strip | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, scale: float, groups: list[Group]
) -> tuple[Tensor, Tensor]:
    """Return the output (batch, num_heads, q_len, v_dim) in the dtype of q, and the log-sum-exp
    (batch, num_heads, q_len) in that of the row."""
    v_dim, q_len = v.shape[-1], q.shape[2]
    q, k, v = flash.same_width(q, k, v)
    row = row.contiguous()
    if len(groups) == len(groups[0].strips) == 1:
        strip = groups[0].strips[0]
        bias, keys = reversed_bias(row, q_len, strip), slice(strip.first, strip.last)
        if bias.numel() * bias.element_size() <= SHORT_BYTES:
            out, lse = flash.attend(q, k[:, :, keys], v[:, :, keys], bias.flip(2), scale)
            return out[..., :v_dim], lse

    # Store heads within tokens, so that joining heads later needs no copy.
    out = q.new_zeros(len(q), q_len, q.shape[1], q.shape[3]).transpose(1, 2)
    lse = row.new_zeros(q.shape[:3])
    for group in groups:
        _run(q, k, v, row, scale, group, out, lse)
    return out[..., :v_dim], lse


def _run(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, scale: float, group: Group, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """Write output and log-sum-exp of a group's queries into `out` and `lse`."""
    strips, shared = group
    begin, end, q_len = strips[0].start, strips[-1].stop, q.shape[2]
    queries = q[:, :, begin:end].flip(2)

    def attend(own: slice, strip: Strip) -> tuple[Tensor, Tensor]:
        keys, bias = slice(strip.first, strip.last), reversed_bias(row, q_len, strip)
        return flash.attend(queries[:, :, own], k[:, :, keys], v[:, :, keys], bias, scale)

    common = None if shared is None else attend(slice(None), shared)
    for strip in strips:
        own = slice(end - strip.stop, end - strip.start)
        parts, spans = [], [(strip.first, strip.last)]
        if common is not None and shared is not None:
            parts = [(common[0][:, :, own], common[1][:, :, own])]
            spans = [(strip.first, shared.first), (shared.last, strip.last)]
        for first, last in spans:
            if first < last:
                parts.append(attend(own, Strip(*strip[:2], first, last)))
        found, found_lse = flash.join(parts)
        out[:, :, strip.start : strip.stop] = found.flip(2)
        lse[:, :, strip.start : strip.stop] = found_lse.flip(2)
