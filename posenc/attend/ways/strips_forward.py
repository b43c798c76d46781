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

    def reading(self, q_len: int, begin: int, end: int) -> "Strip":
        """Drop keys for which all queries read entries of the row outside [begin, end)."""
        first, last = begin - q_len + 1 + self.start, end - q_len + self.stop
        return self._replace(first=max(self.first, first), last=min(self.last, last))


class Group(NamedTuple):
    """Collect strips of consecutive queries. `shared`: keys that all see; None if too few."""

    strips: list[Strip]
    shared: Strip | None

    def near(self, strip: Strip) -> list[Strip]:
        """Return a strip without the shared keys."""
        spans = [strip[2:]]
        if self.shared is not None:
            spans = [(strip.first, self.shared.first), (self.shared.last, strip.last)]
        return [Strip(*strip[:2], *span) for span in spans if span[0] < span[1]]

    def parts(self) -> list[Strip]:
        """Return disjoint parts of all strips."""
        near = [part for strip in self.strips for part in self.near(strip)]
        return near if self.shared is None else [*near, self.shared]


Plan = list[tuple[slice, slice, list[Group]]]
"""Heads of the queries, the heads of the keys that they read, and the groups in which they do."""


def reversed_bias(row: Tensor, q_len: int, strip: Strip) -> Tensor:
    """Return the bias (1, num_heads, rows, keys) of a strip with queries in reverse order, as a
    view of the row (num_heads, q_len + kv_len - 1)."""
    shape = (1, len(row), strip.stop - strip.start, strip.last - strip.first)
    at = row.storage_offset() + q_len - strip.stop + strip.first
    return row.as_strided(shape, (0, row.stride(0), 1, 1), at)


def forward(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, scale: float, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return the output (batch, num_heads, q_len, v_dim) in the dtype of q, and the log-sum-exp
    (batch, num_heads, q_len) in that of the row."""
    v_dim, q_len = v.shape[-1], q.shape[2]
    q, k, v = flash.same_width(q, k, v)
    row = row.contiguous()
    groups = plan[0][2]
    if len(plan) == len(groups) == len(groups[0].strips) == 1:
        strip = groups[0].strips[0]
        bias, keys = reversed_bias(row, q_len, strip), slice(strip.first, strip.last)
        if bias.numel() * bias.element_size() <= SHORT_BYTES:
            out, lse = flash.attend(q, k[:, :, keys], v[:, :, keys], bias.flip(2), scale)
            return out[..., :v_dim], lse

    # Store heads within tokens, so that joining heads later needs no copy.
    out = q.new_zeros(len(q), q_len, q.shape[1], q.shape[3]).transpose(1, 2)
    lse = row.new_zeros(q.shape[:3])
    for mine, theirs, groups in plan:
        given = q[:, mine], k[:, theirs], v[:, theirs], row[mine], out[:, mine], lse[:, mine]
        _write(*given, scale, groups)
    return out[..., :v_dim], lse


def _write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    groups: list[Group],
) -> None:
    """Write the output and log-sum-exp of some heads."""

    def attend(strip: Strip) -> tuple[Tensor, Tensor]:
        queries, keys = q[:, :, strip.start : strip.stop].flip(2), slice(strip.first, strip.last)
        bias = reversed_bias(row, q.shape[2], strip)
        found, found_lse = flash.attend(queries, k[:, :, keys], v[:, :, keys], bias, scale)
        return found.flip(2), found_lse.flip(2)

    for group in groups:
        for strip in group.strips:
            rows = slice(*strip[:2])
            out[:, :, rows], lse[:, :, rows] = flash.join(list(map(attend, group.near(strip))))
        if group.shared is not None:
            rows = slice(*group.shared[:2])
            near = out[:, :, rows], lse[:, :, rows]
            out[:, :, rows], lse[:, :, rows] = flash.join([near, attend(group.shared)])
