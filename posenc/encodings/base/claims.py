"""Define the claims that an encoding makes about itself, which the contract tests check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from posenc.arguments import explain_constructor_misfits


@explain_constructor_misfits
@dataclass(frozen=True)
class Claims:
    """State properties of an encoding; tests check that each holds if and only if it is claimed.

    Args:
        places: where it acts: 1 embeddings, 2 queries and keys, 3 scores, 4 values.
        source: the paper, with year and section or equation.
        shift_invariant: adding one number to all positions changes nothing.
        permutation_invariant: permuting keys together with their positions changes nothing.
        causal_only: undefined, or blind to order, if queries see future keys.
        cache_safe: keys cached at one length are valid at another, so decoding step by step equals
            one pass.
        needs_raw_k: the cache must store untransformed keys, because the term reads them or several
            passes transform them.
        additive: the term adds a bias that does not depend on the scores.
        own_scale: True if the score of a query and a key at one position differs from q . k /
            sqrt(head_dim) even while all parameters are zero. YaRN's factor of cos and sin and
            DeBERTa's 1/sqrt(terms) are such scales.
        reads_scale: the term multiplies with scale(), so no other encoding may change the scale.
        state_kept: tokens whose state is cached: "all" if the term reads the states of keys, "last"
            if only `transform` and the next state read it.
        scope: "model": one instance serves all layers; "layer": each layer has parameters of its
            own.
        shared_parameters: names of parameters that all layers share although scope is "layer".
        max_positions: positions must be below this number; None: no limit.
        num_axes: number of components of a position.
        coordinates: with two components, what they are: "cells", rows and columns counted from 0;
            "normalized", from -1 to 1 over a picture, see posenc.positions.normalized_grid.

    >>> from posenc import ALiBi
    >>> ALiBi(num_heads=4).claims.places
    (3,)
    """

    places: tuple[int, ...] = ()
    source: str = ""
    shift_invariant: bool = True
    permutation_invariant: bool = True
    causal_only: bool = False
    cache_safe: bool = True
    needs_raw_k: bool = False
    additive: bool = True
    own_scale: bool = False
    reads_scale: bool = False
    state_kept: Literal["all", "last"] = "all"
    scope: Literal["model", "layer"] = "model"
    shared_parameters: tuple[str, ...] = ()
    max_positions: int | None = None
    num_axes: int = 1
    coordinates: Literal["cells", "normalized"] = "cells"

    @classmethod
    def combine(cls, claims: "Sequence[Claims]") -> Self:
        """Combine the claims of encodings that act together in one attention, or in different
        layers.

        Of max_positions the smallest counts, of num_axes the largest. causal_only holds if an
        encoding that acts anywhere claims it; coordinates are "normalized" if any encoding has
        normalized ones. The caller sets scope and shared_parameters.
        """
        # NoPE in a composition or a layer acts nowhere. Its causal_only, state_kept and source hold
        # for a model without any encoding: these three are read of the other members only.
        acting_claims = [c for c in claims if c.places] or claims
        any_is_normalized = any(c.coordinates == "normalized" for c in claims)
        limits = [c.max_positions for c in claims if c.max_positions is not None]
        return cls(
            places=tuple(sorted({place for c in claims for place in c.places})),
            source="; ".join(dict.fromkeys(c.source for c in acting_claims)),
            shift_invariant=all(c.shift_invariant for c in claims),
            permutation_invariant=all(c.permutation_invariant for c in claims),
            causal_only=any(c.causal_only for c in acting_claims),
            cache_safe=all(c.cache_safe for c in claims),
            needs_raw_k=any(c.needs_raw_k for c in claims),
            additive=all(c.additive for c in claims),
            own_scale=any(c.own_scale for c in claims),
            reads_scale=any(c.reads_scale for c in claims),
            state_kept="all" if any(c.state_kept == "all" for c in acting_claims) else "last",
            max_positions=min(limits, default=None),
            num_axes=max(c.num_axes for c in claims),
            coordinates="normalized" if any_is_normalized else "cells",
        )
