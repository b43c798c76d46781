"""Use a mask as an encoding."""

from dataclasses import replace

from posenc.encodings.base.position_encoding import Pass, PositionEncoding
from posenc.masks import Mask
from posenc.positions import KeyPositionTensor, QueryPositionTensor


class Within(PositionEncoding):
    """Restrict attention to the pairs that `mask` shows, next to another encoding in Compose.

    Compose(RoPE(...), Within(masks.sliding_window(4096))) rotates, and hides keys 4096 or more
    tokens away. The model's own mask still applies.

    Args:
        mask: an unbound mask; it is bound to the positions of each call.

    shift_invariant is claimed only if the mask depends on nothing but the distance.
    Raises: ValueError for a mask that is bound already.

    >>> from posenc import Within, masks
    >>> Within(masks.sliding_window(4)).claims.shift_invariant
    True
    """

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        if mask.bound:
            raise ValueError("Within: mask must not be bound to positions; each call binds it.")
        self.mask = mask
        # An exact mask is described by `causal` and `window` alone. Both compare distances, which a
        # shift of all positions does not change. Of any other predicate nothing is known.
        self.claims = replace(self.claims, shift_invariant=mask.exact)

    def passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        mask = self.mask.bind(q_positions, kv_positions)
        return (Pass(q_positions, kv_positions, mask),)
