"""Attend with a bias by distance, by strips of queries: the forward pass.

A strip of 256 queries attends to all keys that the mask may show to it. Four strips form a group.
Most of their keys are the same, and torch's kernel is faster with more queries at once, so the
keys that all four see are attended to by one call for the group ("shared"):

    queries of a group   keys
    strip 0              near | shared               | near
    strip 1              near | shared               | near
    strip 2              near | shared               | near
    strip 3              near | shared               | near

What a strip sees besides the shared keys ("near") it attends to by itself, and the two results are
joined by their log-sum-exp.
"""

from typing import NamedTuple

from torch import Tensor

from posenc.attend.ways import flash

MAX_MATERIALIZED_BIAS_BYTES = 2 * 2**20
"""Maximum bytes of a bias that is materialized if there is only one strip, because torch's kernel
reads it faster than a view."""


class Strip(NamedTuple):
    """Name queries [q_start, q_stop) and keys [kv_start, kv_stop) that attend in one call."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    # Methods, not properties, which torch.compile does not trace on named tuples up to torch 2.6.

    def row_slice(self) -> slice:
        """Return the slice of the strip's queries."""
        return slice(self.q_start, self.q_stop)

    def key_slice(self) -> slice:
        """Return the slice of the strip's keys."""
        return slice(self.kv_start, self.kv_stop)

    def first_entry(self, q_len: int) -> int:
        """Return the index in the bias by falling distance that the strip's last query and first
        key read."""
        return q_len - self.q_stop + self.kv_start

    def restrict_to_entries(self, q_len: int, begin: int, end: int) -> "Strip":
        """Return the strip without keys for which all of its queries read entries outside [begin,
        end) of the bias by falling distance, which has q_len + kv_len - 1 entries."""
        # Query i reads entry q_len - 1 - i + j for key j.
        kv_start = begin - q_len + 1 + self.q_start
        kv_stop = end - q_len + self.q_stop
        return self._replace(
            kv_start=max(self.kv_start, kv_start), kv_stop=min(self.kv_stop, kv_stop)
        )


class StripGroup(NamedTuple):
    """Hold the strips of consecutive queries. `shared`: these queries with the keys that all of
    them see; None if the keys are too few to attend to in one call."""

    strips: list[Strip]
    shared: Strip | None

    def near_parts(self, strip: Strip) -> list[Strip]:
        """Return what is left of a strip without the shared keys: one part with the keys before
        them and one with the keys after them, each only if it has keys. If no keys are shared, the
        one part is the strip."""
        if self.shared is None:
            parts = [strip]
        else:
            parts = [
                strip._replace(kv_stop=self.shared.kv_start),
                strip._replace(kv_start=self.shared.kv_stop),
            ]
        return [part for part in parts if part.kv_start < part.kv_stop]

    def all_parts(self) -> list[Strip]:
        """Return parts of the strips that together cover each pair of a query and a key once."""
        near_parts = [part for strip in self.strips for part in self.near_parts(strip)]
        return near_parts if self.shared is None else [*near_parts, self.shared]


class HeadPlan(NamedTuple):
    """Say how the heads `q_head_slice`, which share the heads `kv_head_slice` of keys, attend: in
    which groups of queries."""

    q_head_slice: slice
    kv_head_slice: slice
    groups: list[StripGroup]


StripPlan = list[HeadPlan]
"""Plans for all heads, one for each set of heads that attend together."""


def reversed_bias(row: Tensor, q_len: int, strip: Strip) -> Tensor:
    """Return the bias (1, num_heads, rows, keys) of a strip with queries in reverse order, as a
    view of the bias by falling distance `row`, (num_heads, q_len + kv_len - 1)."""
    shape = (1, len(row), strip.q_stop - strip.q_start, strip.kv_stop - strip.kv_start)
    # One step to the next query, or to the next key, is one entry of the row.
    strides = (0, row.stride(0), 1, 1)
    return row.as_strided(shape, strides, row.storage_offset() + strip.first_entry(q_len))


def forward(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, scale: float, plan: StripPlan
) -> tuple[Tensor, Tensor]:
    """Attend to all keys as `plan` says. Return the output (batch, num_heads, q_len, v_dim) in the
    dtype of q, and the log-sum-exp (batch, num_heads, q_len) in that of the row.

    row: the bias by falling distance, (num_heads, q_len + kv_len - 1).
    """
    v_dim = v.shape[-1]
    q_len = q.shape[2]
    q, k, v = flash.pad_to_same_width(q, k, v)
    row = row.contiguous()
    strip = _only_strip(plan)
    if strip is not None:
        bias = reversed_bias(row, q_len, strip)
        if bias.numel() * bias.element_size() <= MAX_MATERIALIZED_BIAS_BYTES:
            key_slice = strip.key_slice()
            out, lse = flash.attend(q, k[:, :, key_slice], v[:, :, key_slice], bias.flip(2), scale)
            return out[..., :v_dim], lse

    # Store heads within tokens, so that joining heads later needs no copy.
    out = q.new_zeros(len(q), q_len, q.shape[1], q.shape[3]).transpose(1, 2)
    lse = row.new_zeros(q.shape[:3])
    for q_head_slice, kv_head_slice, groups in plan:
        head_attention = _HeadAttention(
            q[:, q_head_slice], k[:, kv_head_slice], v[:, kv_head_slice], row[q_head_slice], scale
        )
        head_attention.attend_groups_into(groups, out[:, q_head_slice], lse[:, q_head_slice])
    return out[..., :v_dim], lse


def _only_strip(plan: StripPlan) -> Strip | None:
    """Return the strip of a plan that has only one; None if the plan has several."""
    groups = plan[0].groups
    if len(plan) == len(groups) == len(groups[0].strips) == 1:
        return groups[0].strips[0]
    return None


class _HeadAttention(NamedTuple):
    """Hold queries of some heads (batch, heads, q_len, width), their keys and values, and their
    bias by falling distance `row`, (heads, q_len + kv_len - 1)."""

    q: Tensor
    k: Tensor
    v: Tensor
    row: Tensor
    scale: float

    def attend_groups_into(self, groups: list[StripGroup], out: Tensor, lse: Tensor) -> None:
        """Attend by groups of strips, and write the results, output (batch, heads, q_len, width)
        and log-sum-exp (batch, heads, q_len), into `out` and `lse`."""
        for group in groups:
            for strip in group.strips:
                row_slice = strip.row_slice()
                near_results = [self._attend(part) for part in group.near_parts(strip)]
                out[:, :, row_slice], lse[:, :, row_slice] = flash.join_attention(near_results)
            if group.shared is not None:
                row_slice = group.shared.row_slice()
                near_result = (out[:, :, row_slice], lse[:, :, row_slice])
                shared_result = self._attend(group.shared)
                out[:, :, row_slice], lse[:, :, row_slice] = flash.join_attention(
                    [near_result, shared_result]
                )

    def _attend(self, strip: Strip) -> tuple[Tensor, Tensor]:
        """Return the output of the strip's queries over its keys, (batch, heads, rows, width), and
        the log-sum-exp."""
        queries = self.q[:, :, strip.row_slice()].flip(2)  # reversed, as the bias is
        k = self.k[:, :, strip.key_slice()]
        v = self.v[:, :, strip.key_slice()]
        bias = reversed_bias(self.row, self.q.shape[2], strip)
        out, lse = flash.attend(queries, k, v, bias, self.scale)
        return out.flip(2), lse.flip(2)
