"""Rotary embeddings in most layers, no position encoding in every n-th layer."""

from dataclasses import replace
from typing import Any, Literal

from posenc.arguments import explain_misfits
from posenc.encodings.base.per_layer import PerLayer
from posenc.encodings.base.position_encoding import ModelShape, PositionEncoding
from posenc.encodings.queries_keys.query_temperature import Llama4Temperature
from posenc.encodings.queries_keys.rope import RoPE
from posenc.masks import Mask, chunked


class RNoPE(PerLayer):
    """Use RoPE in all layers but every n-th, which has no position encoding and no window.

    layer i: RoPE, optionally with a window, where (i + 1) mod every != 0; otherwise NoPE,
    optionally with a temperature

    Without further options this is SmolLM3; with window_size Command A (RNoPE-SWA); with chunk_size
    and floor_scale Llama 4 (iRoPE: 8192 and 8192, interleaved).

    Args:
        head_dim: size of one head.
        rope_theta: base of RoPE's frequencies.
        interleaved: RoPE's layout, see RoPE.
        every: period of the layers without RoPE, at least 2; 4: layers 3, 7, 11, ... have none.
        window_size: keys visible to a query in a RoPE layer, counting itself; None for no limit.
        chunk_size: queries in RoPE layers see keys of their own chunk only; not with window_size.
        floor_scale: multiply the queries of NoPE layers by Llama 4's temperature, 1 + 0.1 ln(1 +
            floor((p + 1) / floor_scale)); None for no temperature.

    Layer i uses for_layer(i). Windows are applied in addition to the model's own mask.
    Raises: ValueError if every < 2, or both window_size and chunk_size are given.
    Source: Yang et al. 2025, arXiv:2501.18795 (RNoPE-SWA); Meta 2025, llama-models, llama4 (iRoPE);
    Hugging Face 2025, SmolLM3.

    >>> rnope = posenc.RNoPE(head_dim=16, interleaved=False)
    >>> [rnope.for_layer(i).claims.places for i in range(4)]
    [(2,), (2,), (2,), ()]
    """

    claims = replace(
        PerLayer.claims,
        source="Yang et al. 2025, arXiv:2501.18795; Meta 2025, github.com/meta-llama/llama-models",
    )

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        every: int = 4,
        window_size: int | None = None,
        chunk_size: int | None = None,
        floor_scale: int | None = None,
    ) -> None:
        if every < 2:
            raise ValueError(f"RNoPE: every must be at least 2, got {every}.")
        if window_size is not None and chunk_size is not None:
            raise ValueError(
                f"RNoPE: give window_size or chunk_size, not both; got {window_size}, {chunk_size}."
            )
        window: int | Mask | None = window_size if chunk_size is None else chunked(chunk_size)
        rope: PositionEncoding = RoPE(head_dim, rope_theta, interleaved=interleaved)
        encoding_of_last_layer = (
            PositionEncoding() if floor_scale is None else Llama4Temperature(floor_scale)
        )
        layers = [rope] * (every - 1) + [encoding_of_last_layer]
        windows = [window] * (every - 1) + [None]
        super().__init__(layers, windows=windows, repeat=True)

    @classmethod
    @explain_misfits
    def from_shape(
        cls,
        shape: ModelShape,
        *,
        windows: Literal["sliding", "chunked"] | None = None,
        **options: Any,
    ) -> "RNoPE":
        """Build the encoding for a model.

        windows: "sliding": layers with RoPE see a window of half the training length. "chunked":
        chunk_size and floor_scale are the training length. None: no windows, unless options say so.
        """
        if windows == "sliding":
            options.setdefault("window_size", max(1, shape.train_length // 2))
        elif windows == "chunked":
            options.setdefault("chunk_size", shape.train_length)
            options.setdefault("floor_scale", shape.train_length)
        elif windows is not None:
            raise ValueError(f"RNoPE: windows must be sliding or chunked, got {windows!r}.")
        return super().from_shape(shape, **options)
