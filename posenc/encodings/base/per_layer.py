"""Give each layer an encoding, parameters or a window of its own."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn, Self

from torch import nn

from posenc.arguments import explain_misfits
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.compose import Compose, Within
from posenc.encodings.base.position_encoding import (
    Embedded,
    EmbeddedPositions,
    PositionEncoding,
    require_encoding,
)
from posenc.encodings.base.term import Tokens
from posenc.masks import Mask, sliding_window
from posenc.positions.tokens import KeyPositionTensor, Positions, QueryPositionTensor


class PerLayer(PositionEncoding):
    """Use a different encoding in each layer: layers[i] in layer i.

    Args:
        layers: the encoding of each layer; an encoding that appears twice is shared.
        windows: for each layer, the number of keys visible to a query, counting itself; or a mask
            such as masks.chunked(n); or None for no limit. The model's own mask still applies.
        repeat: start again with layers[0] after the last, for any number of layers.

    Attention needs the encoding of one layer, `for_layer(i)`. At the embeddings the encoding of the
    first layer acts, once per model. A claim holds if it holds in every layer; causal_only if any
    layer's encoding that acts claims it.
    Raises: ValueError if layers is empty, windows has another length, only a later layer embeds, or
    an encoding would act in no layer; `check_layers` if a model has fewer layers than the pattern.
    Source: the encodings of the layers.

    >>> fire = posenc.FIRE(num_heads=4)
    >>> each = posenc.PerLayer.replicate(fire, 3)
    >>> each.num_parameters == 3 * fire.num_parameters
    True
    """

    # Of the class, whose methods act at all places, as __init_subclass__ demands. An object claims
    # what its layers do.
    claims = Claims(places=(1, 2, 3, 4), source="the encodings of its layers")

    def __init__(
        self,
        layers: Sequence[PositionEncoding],
        *,
        windows: Sequence[int | Mask | None] | None = None,
        repeat: bool = False,
    ) -> None:
        super().__init__()
        if not layers:
            raise ValueError("PerLayer: needs the encoding of at least one layer, got none.")
        layers = [require_encoding("PerLayer", e) for e in layers]
        if windows is not None:
            if len(windows) != len(layers):
                raise ValueError(
                    f"PerLayer: windows must be one per layer ({len(layers)}), got {len(windows)}."
                )
            layers = [_restrict_to_window(e, w) for e, w in zip(layers, windows, strict=True)]
        if 1 not in layers[0].claims.places and any(1 in e.claims.places for e in layers):
            raise ValueError(
                "PerLayer: embeddings are encoded once, by layer 0; give it that encoding."
            )
        # As built; `members` are these, or prepared copies of them.
        self.layers = nn.ModuleList(layers)
        self.repeat = repeat
        self._prepared_members: tuple[PositionEncoding, ...] | None = None
        self._check_every_member_acts()
        # Without `repeat` there is an encoding for each layer already, and nothing to copy.
        must_copy = repeat and any(e.claims.scope == "layer" for e in layers)
        self.claims = replace(
            Claims.combine([e.claims for e in layers]),
            source=self.claims.source,
            scope="layer" if must_copy else "model",
        )

    @classmethod
    @explain_misfits
    def replicate(cls, encoding: PositionEncoding, num_layers: int) -> "PerLayer":
        """Return a PerLayer with a copy of `encoding`, with new parameters, for each of num_layers
        layers.

        Parameters named in `shared_parameters` stay shared by all layers. If `encoding` is a
        PerLayer that repeats, layer i gets a copy of layers[i % n], or the same object if its scope
        is "model".

        Raises: ValueError if a PerLayer has a longer pattern than num_layers.
        """
        if not isinstance(encoding, PerLayer):
            return PerLayer([_shared_or_copied(encoding) for _ in range(num_layers)])
        encoding.check_layers("PerLayer.replicate", num_layers)
        return PerLayer([_shared_or_copied(encoding.acting_encoding(i)) for i in range(num_layers)])

    @property
    def period(self) -> int:
        """Return the number of layers after which the encodings repeat. Without `repeat`, return
        the number of layers for which there are encodings."""
        inner_periods = [e.period for e in self.layers if isinstance(e, PerLayer) and e.repeat]
        return math.lcm(len(self.layers), *inner_periods) if self.repeat else len(self.layers)

    def check_layers(self, caller: str, num_layers: int) -> None:
        """Raise ValueError if in a model of num_layers layers a part of the encodings would never
        act."""
        if num_layers >= self.period:
            return
        class_name = type(self).__name__
        if not self.repeat:
            raise ValueError(
                f"{caller}: {class_name} has encodings for {self.period} layers, and the model has "
                f"{num_layers}, so that the last ones never act. Give one for each layer."
            )
        shorter_pattern_hint = ""
        if num_layers > 1:
            shorter_pattern_hint = f", or a pattern of at most {num_layers}"
            if self.period > 2:
                shorter_pattern_hint += f" (such as every={num_layers})"
        raise ValueError(
            f"{caller}: {class_name} repeats after {self.period} layers, and the model has "
            f"{num_layers}, so that a part of it never acts. Use {self.period} layers or more"
            f"{shorter_pattern_hint}."
        )

    def acting_encoding(self, index: int) -> PositionEncoding:
        """Return the encoding that acts in layer `index`. If a member is a PerLayer itself, return
        the encoding that this one uses in the layer."""
        member = self.members[index % len(self.members)]
        return member.acting_encoding(index) if isinstance(member, PerLayer) else member

    def _check_every_member_acts(self) -> None:
        """Raise ValueError if an encoding acts in no layer.

        An example is "rnope/alibi", which alternates: RNoPE acts in even layers only. Of its own
        pattern of four layers, the encoding of the fourth (layers 3, 7, ...) never acts, because
        ALiBi has these layers.
        """
        acting_ids = {id(self.acting_encoding(i)) for i in range(self.period)}
        for inner in self.layers:
            if isinstance(inner, PerLayer) and not acting_ids.issuperset(
                map(id, inner._innermost_members())
            ):
                raise ValueError(
                    f"{type(self).__name__}: a part of {type(inner).__name__} would act in no "
                    "layer, because it has a pattern of layers of its own. Write the encodings "
                    "of all layers in one pattern."
                )

    def _innermost_members(self) -> list[PositionEncoding]:
        """Return the members, with a PerLayer among them replaced by its own members, and so on."""
        leaves: list[PositionEncoding] = []
        for member in self.members:
            leaves += member._innermost_members() if isinstance(member, PerLayer) else [member]
        return leaves

    def reset_parameters(self) -> None:
        for encoding in dict.fromkeys(self.members):
            encoding.reset_parameters()

    def for_layer(self, index: int) -> PositionEncoding:
        """Return the encoding of layer `index`, counted from 0. Raise ValueError if there is none
        and the pattern does not repeat."""
        members = self.members
        if not self.repeat and index >= len(members):
            raise ValueError(
                f"PerLayer: has {len(members)} layers, asked for layer {index} counting from 0. "
                "Give an encoding for each layer, or repeat=True."
            )
        return members[index % len(members)].for_layer(index)

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        members = self.members  # once: torch.export may give a module in another guise each time
        prepared_by_member = {e: e.prepare(positions, length) for e in dict.fromkeys(members)}
        prepared = self.shallow_copy()
        prepared._prepared_members = tuple(prepared_by_member[e] for e in members)
        return prepared

    def embed(self, x: Embedded, positions: EmbeddedPositions) -> Embedded:
        return self.members[0].embed(x, positions)

    def passes(self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__}: layers differ, so attention needs one layer's encoding: "
            "pass encoding.for_layer(i)."
        )

    # `attention` asks for the passes first, and raises there. Who calls these two himself gets the
    # same message.
    def transform(self, q: Tokens, k: Tokens) -> NoReturn:
        self.passes(q.positions, k.positions)

    def term(self, q: Tokens, k: Tokens) -> NoReturn:
        self.passes(q.positions, k.positions)

    @property
    def members(self) -> tuple[PositionEncoding, ...]:
        """Return the encodings of the layers; their prepared copies if this object was prepared."""
        return tuple(self.layers) if self._prepared_members is None else self._prepared_members  # type: ignore[return-value]


def _restrict_to_window(encoding: PositionEncoding, window: int | Mask | None) -> PositionEncoding:
    """Return the encoding combined with a window, of `window` keys that a query sees, counting its
    own, or with a mask. For None return the encoding itself."""
    if window is None:
        return encoding
    mask = window if isinstance(window, Mask) else sliding_window(window)
    return Compose(encoding, Within(mask))


def _shared_or_copied(encoding: PositionEncoding) -> PositionEncoding:
    """Return the encoding for one more layer: itself if its scope is "model", otherwise a copy with
    new parameters, except those that all layers share."""
    if encoding.claims.scope == "model":
        return encoding
    shared_parameters = [encoding.get_parameter(name) for name in encoding.claims.shared_parameters]
    copied = copy.deepcopy(encoding, {id(parameter): parameter for parameter in shared_parameters})
    copied.reset_parameters()
    return copied


def encoding_of_all_layers(encoding: PositionEncoding | None, num_layers: int) -> PositionEncoding:
    """Return one encoding for a model of num_layers layers: a PerLayer with a copy for each layer
    if the scope of `encoding` is "layer", otherwise the encoding itself; NoPE for None.

    Raises: ValueError for a PerLayer with a longer pattern than num_layers.
    """
    encoding = require_encoding("the model", encoding)
    if isinstance(encoding, PerLayer):
        encoding.check_layers("the model", num_layers)
    if encoding.claims.scope == "layer":
        return PerLayer.replicate(encoding, num_layers)
    return encoding
