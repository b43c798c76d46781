"""Attend with a bias by distance, by strips of queries: the forward pass."""

from typing import NamedTuple

from torch import Tensor

from posenc.attend.ways import flash

SHORT_BYTES = 2 * 2**20
"""Maximum size of a bias that is materialized if there is only one strip, because torch's kernel
reads it faster than a view."""
TURNED_BYTES = 4 * 2**20
"""Size of keys and values that are copied in reverse order at a time: those of one head or more.
torch's kernel then adds the tiny weights of far keys last. If it adds them first, their sums are
below the smallest normal number, which is slow on Intel's CPUs: ALiBi takes a quarter longer."""


class Strip(NamedTuple):
    """Select queries [start, stop) and a range of keys [first, last) with all that they may see."""

    start: int
    stop: int
    first: int
    last: int


def reversed_bias(row: Tensor, q_len: int, strip: Strip) -> Tensor:
    """Return the bias (1, num_heads, rows, keys) of a strip with queries in reverse order, as a
    view of the row (num_heads, q_len + kv_len - 1)."""
    return _view(row, q_len - strip.stop + strip.first, strip)


def _view(row: Tensor, at: int, strip: Strip) -> Tensor:
    """Return row[at + i + j] for the i-th query and j-th key of a strip, (1, num_heads, i, j)."""
    shape = (1, len(row), strip.stop - strip.start, strip.last - strip.first)
    return row.as_strided(shape, (0, row.stride(0), 1, 1), row.storage_offset() + at)


class Group(NamedTuple):
    """Collect strips of consecutive queries. `shared`: keys that all see; None if too few."""

    strips: list[Strip]
    shared: Strip | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, scale: float, groups: list[Group]
) -> tuple[Tensor, Tensor]:
    """Return the output (batch, num_heads, q_len, v_dim) in the dtype of q, and the log-sum-exp
    (batch, num_heads, q_len) in that of the row."""
    v_dim, q_len, kv_len = v.shape[-1], q.shape[2], k.shape[2]
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
    by_keys, num = kv_len <= 2 * q_len, k.shape[1]
    step = max(1, TURNED_BYTES * num // max(1, k.nbytes + v.nbytes)) if by_keys else num
    mine = (t.split(step * q.shape[1] // num, 1) for t in (q, row[None], out, lse))
    for heads in zip(*mine, k.split(step, 1), v.split(step, 1), strict=True):
        _write(heads, scale, groups, by_keys)
    return out[..., :v_dim], lse


def _write(heads: tuple[Tensor, ...], scale: float, groups: list[Group], by_keys: bool) -> None:
    """Write the output and log-sum-exp of some heads."""
    q, rows, out, lse, k, v = heads
    q_len, kv_len, row = q.shape[2], k.shape[2], rows[0]
    if by_keys:
        k, v, row = k.flip(2), v.flip(2), row.flip(1)

    def attend(strip: Strip) -> tuple[Tensor, Tensor]:
        start, stop, first, last = strip
        queries = q[:, :, start:stop]
        if by_keys:
            bias = _view(row, kv_len + start - last, strip)
            keys = slice(kv_len - last, kv_len - first)
            return flash.attend(queries, k[:, :, keys], v[:, :, keys], bias, scale)
        keys, bias = slice(first, last), reversed_bias(row, q_len, strip)
        found, found_lse = flash.attend(queries.flip(2), k[:, :, keys], v[:, :, keys], bias, scale)
        return found.flip(2), found_lse.flip(2)

    for strips, shared in groups:
        if shared is not None:
            rows = slice(*shared[:2])
            out[:, :, rows], lse[:, :, rows] = attend(shared)
        for strip in strips:
            rows, parts, spans = slice(*strip[:2]), [], [strip[2:]]
            if shared is not None:
                parts = [(out[:, :, rows], lse[:, :, rows])]
                spans = [(strip.first, shared.first), (shared.last, strip.last)]
            parts += [attend(Strip(*strip[:2], *span)) for span in spans if span[0] < span[1]]
            out[:, :, rows], lse[:, :, rows] = flash.join(parts)
