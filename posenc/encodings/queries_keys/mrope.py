"""Multimodal RoPE: time, height and width share one series of frequencies."""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Literal

from posenc.encodings.queries_keys.rope import RoPE
from posenc.frequencies.scalings.scaling import Frequencies, Scaling


class MRoPE(RoPE):
    """Rotate each pair by the time, the height or the width of a token.

    angle[t] = position[axis(t)] * rope_theta^(-2t/rotary_dim)

    A text token has three equal components, so text gets plain RoPE. `mrope_positions` builds
    positions for text mixed with images or video. Qwen2-VL gives time the fastest pairs, then
    height, then width (contiguous sections); in Qwen3-VL the axes alternate, so each has fast and
    slow pairs. VideoRoPE alternates height and width over the fast pairs and gives time the
    slowest pairs. HoPE is VideoRoPE without a rotation of these slowest pairs.

    Args:
        head_dim, rope_theta, interleaved, rotary_dim, scaling: as in RoPE.
        sections: pairs for time, height and width, which sum to rotary_dim / 2; None means the
            models' fractions: 1/4, 3/8 and 3/8 if contiguous, 3/8, 5/16 and 5/16 if alternating.
        alternating: the axes alternate from pair to pair; False: contiguous sections.
        time: "first": the first section is for time, as in Qwen2-VL; "slowest": time has the
            slowest pairs, as in VideoRoPE; "still": these do not rotate, as in HoPE. The last two
            do not go with alternating.

    Shapes: positions (len, 3) or (batch, len, 3); q and k as in RoPE.
    Units: components in tokens, frames and patches. Precision: as RoPE.
    Raises: ValueError if the sections do not fit rotary_dim.
    Source: Wang et al. 2024, arXiv:2409.12191, section 2.1; Qwen3-VL, arXiv:2511.21631;
    VideoRoPE, Wei et al. 2025, arXiv:2502.05173; HoPE, Li et al. 2025, arXiv:2505.20444.

    >>> mrope = posenc.MRoPE(head_dim=64, interleaved=False)
    >>> positions = posenc.mrope_positions([2, (1, 2, 2), 3])  # text, 2 x 2 patches, text
    >>> q, k = mrope(torch.randn(1, 8, 9, 64), torch.randn(1, 8, 9, 64), positions)
    >>> q.shape
    torch.Size([1, 8, 9, 64])
    """

    num_still_pairs = 0
    """Number of pairs that do not rotate: the slowest ones. RoPE's constructor reads it, by
    `frequencies`, before that of this class sets it."""
    claims = replace(
        RoPE.claims, source="Wang et al. 2024, arXiv:2409.12191, section 2.1", num_axes=3
    )

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        rotary_dim: int | None = None,
        scaling: Scaling | None = None,
        sections: Sequence[int] | None = None,
        alternating: bool = False,
        time: Literal["first", "slowest", "still"] = "first",
    ) -> None:
        super().__init__(
            head_dim, rope_theta, interleaved=interleaved, rotary_dim=rotary_dim, scaling=scaling
        )
        if scaling is not None and scaling.exempt_tokens:
            raise ValueError("MRoPE: exempt_tokens needs positions of one component.")
        if time not in ("first", "slowest", "still") or (alternating and time != "first"):
            raise ValueError(
                "MRoPE: time must be first, slowest or still, the last two without alternating, "
                f"got {time!r}."
            )
        num_pairs = self.rotary_dim // 2
        if sections is None:
            pairs_per_side = num_pairs * 5 // 16 if alternating else num_pairs * 3 // 8
            sections = (num_pairs - 2 * pairs_per_side, pairs_per_side, pairs_per_side)
        self.sections = tuple(sections)
        if alternating:
            axes = _alternating_axes(self.sections)
        elif time == "first":
            axes = _contiguous_axes(self.sections)
        else:
            axes = _axes_with_time_last(self.sections)
        # Sections of other lengths, or too long to alternate, do not come out as they were given.
        if [axes.count(a) for a in range(3)] != list(self.sections) or len(axes) != num_pairs:
            raise ValueError(
                f"MRoPE: sections must be three numbers of pairs that sum to rotary_dim / 2 = "
                f"{num_pairs}"
                f"{', none of the last two above a third of it' if alternating else ''}, "
                f"got {self.sections}."
            )
        self.num_still_pairs = self.sections[0] if time == "still" else 0
        self._set_frequencies(self.frequencies(), axes)

    def frequencies(self, length: int | None = None) -> Frequencies:
        frequencies = super().frequencies(length)
        inv_freq = frequencies.inv_freq
        rotating_frequencies = inv_freq[: len(inv_freq) - self.num_still_pairs]
        return frequencies._replace(
            inv_freq=rotating_frequencies + (Decimal(0),) * self.num_still_pairs
        )


def _contiguous_axes(sections: Sequence[int]) -> list[int]:
    """Return the axis of each pair, fastest first: 0 time, 1 height, 2 width. Time has the first
    pairs, then height, then width, as many as their sections."""
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


def _axes_with_time_last(sections: Sequence[int]) -> list[int]:
    """Return the axis of each pair, fastest first: 0 time, 1 height, 2 width. Height and width
    alternate, and time has the last pairs.

    >>> _axes_with_time_last([2, 1, 1])
    [1, 2, 0, 0]
    """
    num_time_pairs, num_height_pairs, num_width_pairs = sections
    return [1 + t % 2 for t in range(num_height_pairs + num_width_pairs)] + [0] * num_time_pairs


def _alternating_axes(sections: Sequence[int]) -> list[int]:
    """Return the axis of each pair, fastest first: 0 time, 1 height, 2 width. Height has the pairs
    1, 4, 7, ... and width 2, 5, 8, ..., as many as their sections; time has all others."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return axes
