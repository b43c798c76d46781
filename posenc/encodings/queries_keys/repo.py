"""RePo: rotary embeddings at positions that a small network computes from each token."""

from jaxtyping import Float, Real, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import (
    Cached,
    CachedPositions,
    PositionEncoding,
    check_head_dim,
    check_state_shape,
)
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.encodings.numerics.precision import at_least_float32, read_linear
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.encodings.queries_keys.rotate import rotate
from posenc.frequencies.series import inverse_frequencies


class RePo(PositionEncoding):
    """Rotate q and k as RoPE does, at real positions computed from each token's hidden state.

    position[h] = final_h . (silu(gate x) * (content x)), angle[h, t] = position[h] * inv_freq[t]

    The index of a token is not used; order comes from the causal mask only. The authors keep RoPE
    in the lower layers: PerLayer([rope, ..., repo, ...]).

    Args:
        embed_dim: width of the layer's input.
        num_kv_heads: number of key/value heads; each has its own positions, shared by its query
            heads.
        head_dim: size of one head, even.
        rope_theta: base of the geometric series of frequencies.

    Shapes: gate, content (embed_dim // 8, embed_dim), final (num_kv_heads, embed_dim // 8), without
    biases; the state (batch, num_kv_heads, len) is the positions. Pairs are (t, t + head_dim/2).
    Units: positions in tokens. Precision: positions and angles in float64, rotated in float32,
    rounded once.
    Raises: ValueError if head_dim is odd, or q or k has another head_dim.
    Source: Li et al. 2025, arXiv:2512.14391; github.com/SakanaAI/repo, dynamic_pe_mode SEXMH.

    >>> repo = posenc.RePo(embed_dim=64, num_kv_heads=4, head_dim=16)
    >>> repo.state(torch.randn(1, 6, 64), torch.arange(6)).shape
    torch.Size([1, 4, 6])
    """

    claims = Claims(
        places=(2,),
        source="Li et al. 2025, arXiv:2512.14391; github.com/SakanaAI/repo",
        scope="layer",
        causal_only=True,
        state_kept="last",
    )

    def __init__(
        self, embed_dim: int, num_kv_heads: int, head_dim: int, rope_theta: float = 10000.0
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"RePo: head_dim must be even, got {head_dim}.")
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        width = max(1, embed_dim // 8)
        self.gate = nn.Linear(embed_dim, width, bias=False)
        self.content = nn.Linear(embed_dim, width, bias=False)
        self.final = nn.Linear(width, num_kv_heads, bias=False)
        self.exact_frequencies = ExactFrequencies(inverse_frequencies(head_dim, rope_theta))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal values with standard deviation 0.02."""
        for linear in (self.gate, self.content, self.final):
            nn.init.normal_(linear.weight, std=0.02)

    def state(
        self,
        x: Float[Tensor, "batch seq_len embed_dim"],
        positions: Real[Tensor, "#batch seq_len *axes"] | Real[Tensor, "seq_len *axes"],
        past: Shaped[Tensor, "batch heads past_len *state"] | None = None,
    ) -> Float[Tensor, "batch heads seq_len"]:
        """Return the positions of the tokens, (batch, num_kv_heads, len), computed in float64 from
        their hidden states x alone: `positions` and `past` are not used."""
        x = x.double()
        gate, content, final = (
            read_linear(layer, x.dtype).weight for layer in (self.gate, self.content, self.final)
        )
        hidden = F.silu(F.linear(x, gate)) * F.linear(x, content)
        return F.linear(hidden, final).transpose(1, 2)

    def transform(
        self, q: Tokens, k: Tokens
    ) -> tuple[
        Float[Tensor, "batch num_heads {len(q)} {self.head_dim}"],
        Float[Tensor, "batch num_kv_heads {len(k)} {self.head_dim}"],
    ]:
        return self._rotate_by_state(q), self._rotate_by_state(k)

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        return k  # positions come from the content

    def _rotate_by_state(self, tokens: Tokens) -> Tensor:
        """Return the vectors of tokens, rotated at the real positions that are their state."""
        x = tokens.x
        state = tokens.state
        assert x is not None
        if state is None:
            raise ValueError(
                "RePo: attention needs q_state and kv_state, the positions of queries and keys; "
                "take them from state(x, positions), or use posenc.Attention, which does."
            )
        check_head_dim(self, self.head_dim, x)
        check_state_shape(self, state, self.final.out_features)
        angle = repeat_kv_heads(self.exact_frequencies.reduced_angles(state), x.shape[1]).flatten(
            0, 1
        )
        dtype = at_least_float32(x.dtype)
        flat_heads = x.flatten(0, 1)[:, None]  # a row of the batch for each head
        cos = angle.cos().to(dtype)
        sin = angle.sin().to(dtype)
        return rotate(flat_heads, cos, sin, interleaved=False).view_as(x)
