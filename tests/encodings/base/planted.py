"""Wrong encodings, each with a mistake that somebody has made or could make."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from posenc import DistanceBias, PositionEncoding
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.term import PairwiseBias, Term, Tokens
from posenc.encodings.embeddings.learned import Learned
from posenc.encodings.embeddings.sinusoidal import Sinusoidal
from posenc.encodings.numerics import slopes_and_buckets as bias_numbers
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.queries_keys.rotate import rotate
from posenc.encodings.scores.alibi import ALiBi
from posenc.encodings.values.rove import RoVE

WRONG = Claims(places=(3,), source="nobody, 2026", causal_only=True)


def moved(tokens: Tokens, positions: Tensor) -> Tokens:
    return tokens.at(positions, mapped=False)


class Rotary(RoPE):
    """A RoPE to plant mistakes in, buildable from a shape."""

    def __init__(self, head_dim: int, rope_theta: float = 10000.0, *, interleaved: bool = False):
        super().__init__(head_dim, rope_theta, interleaved=interleaved)


class ThetaIgnored(Rotary):
    def __init__(self, head_dim: int, rope_theta: float = 10000.0, *, interleaved: bool = False):
        super().__init__(head_dim, 10000.0, interleaved=interleaved)


class ScalesInSecret(ALiBi):
    """A bias that also takes 1/sqrt(head_dim) away."""

    def scale(self, head_dim: int) -> float:
        return 1.0


class DoublesItsQueries(Rotary):
    def transform(self, q, k):
        new_q, new_k = super().transform(q, k)
        return 2 * new_q, new_k


class HotAfterTraining(Rotary):
    """A temperature that begins beyond the training length."""

    def transform(self, q, k):
        new_q, new_k = super().transform(q, k)
        return torch.where(q.positions[:, None] > 100, 2 * new_q, new_q), new_k


class TurnsByOrder(Rotary):
    """Right: angles that count the tokens before, as encodings that read content do."""

    claims = replace(RoPE.claims, permutation_invariant=False)

    def transform(self, q, k):
        order = torch.arange(k.x.shape[2])
        return super().transform(moved(q, order[-q.x.shape[2] :]), moved(k, order))


class DoublesAndTurnsByOrder(TurnsByOrder):
    def transform(self, q, k):
        new_q, new_k = super().transform(q, k)
        return 2 * new_q, new_k


class ClaimsAScale(ALiBi):
    claims = replace(ALiBi.claims, own_scale=True)


class ThetaMissingFromTheCache(Rotary):
    """Equinox: tables of all instances in one dictionary, keyed by the size."""

    shared: dict = {}  # noqa: RUF012 - the mistake

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32):
        key = (self.head_dim, dtype, positions.shape, tuple(positions.flatten().tolist()))
        if key not in self.shared:
            self.shared[key] = super().cos_sin(positions, dtype)
        return self.shared[key]

    def prepare(self, positions: Tensor, length: int | None = None) -> PositionEncoding:
        return self


class AnglesInTheInputsType(Rotary):
    """rotary-embedding-torch: positions are made in q's dtype."""

    def transform(self, q, k):
        return super().transform(*(moved(t, t.positions.to(t.x.dtype)) for t in (q, k)))


class CentredPerCall(Rotary):
    """xPos of rotary-embedding-torch: the origin is the middle of whatever is passed."""

    def transform(self, q, k):
        return super().transform(moved(q, q.positions - k.positions.double().mean()), k)


class FirstPositionIsAlwaysZero(Rotary):
    """Positions are counted from the shape of the input."""

    def transform(self, q, k):
        return super().transform(*(moved(t, torch.arange(t.x.shape[2])) for t in (q, k)))


class LongestRowDecides(Rotary):
    """Dynamic scaling that reads the length off the batch."""

    def transform(self, q, k):
        stretch = k.positions.max() // 25 + 1
        return super().transform(*(moved(t, t.positions / stretch) for t in (q, k)))


class PositionsTruncated(Rotary):
    """Position interpolation in whole numbers: neighbours share a position."""

    def transform(self, q, k):
        return super().transform(*(moved(t, t.positions // 4) for t in (q, k)))


class FrequenciesInABuffer(PositionEncoding):
    """`.to(bfloat16)` rounds inv_freq, and a meta device leaves it empty."""

    claims = Claims(places=(2,), source="nobody, 2026")

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def transform(self, q, k):
        rotated = []
        for tokens in (q, k):
            angle = tokens.positions[..., None] * self.inv_freq
            rotated.append(rotate(tokens.x, angle.cos(), angle.sin(), interleaved=False))
        return tuple(rotated)


class KeyOnlyALiBi(PositionEncoding):
    """BLOOM: slope * key position, in the model's dtype."""

    claims = WRONG

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes = bias_numbers.alibi_slopes(num_heads)

    def term(self, q, k):
        slopes = torch.tensor(self.slopes, dtype=q.x.dtype)

        def bias(q_part, k_part):
            row = slopes[:, None] * k_part.positions.to(slopes.dtype)
            return row[:, None].expand(-1, len(q_part), -1)

        return PairwiseBias(q, k, bias)


class KeyOnlyThirds(KeyOnlyALiBi):
    """The same with slopes that no float holds, so that every product is rounded."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.slopes = tuple(1 / (2 * h + 3) for h in range(num_heads))


class FutureRewarded(ALiBi):
    """attention-gym: (key - query) * slope without a mask claims to serve encoders."""

    def bias(self, distance: Tensor) -> Tensor:
        return -super().bias(distance.abs()) * distance.sign()


class DistanceBetweenIndices(PositionEncoding):
    """FlexAttention's examples: the distance is q_idx - kv_idx, whatever the positions are."""

    claims = WRONG

    def term(self, q, k):
        return ByIndex(q, k)


class ByIndex(Term):
    def add(self, scores, rows, keys, mask):
        i = torch.arange(rows.start, rows.stop)[:, None]
        return scores - 0.5 * (i - torch.arange(keys.start, keys.stop)).abs()


class CountedFromTheShape(Sinusoidal):
    """The first token passed is always token 0."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().embed(x, torch.arange(x.shape[1]))


class SilentlyWrapped(Learned):
    """Beyond the table, start again."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().embed(x, positions % self.claims.max_positions)


class OutputInFloat32(Sinusoidal):
    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.vectors(positions)


class NotANumberWhereNothingIsSeen(PositionEncoding):
    """-inf in every place of a row: softmax gives 0 / 0."""

    claims = WRONG

    def term(self, q, k):
        return NormalisedRows(q, k)


class NormalisedRows(Term):
    additive, reads_mask = False, True

    def add(self, scores, rows, keys, mask):
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1).log()


class SumsByItsWord(PositionEncoding):
    """A term that says it only adds, and doubles the scores."""

    claims = replace(WRONG, additive=False)

    def term(self, q, k):
        return Doubles(q, k)


class Doubles(Term):
    additive = True

    def add(self, scores, rows, keys, mask):
        return scores * 2


class PeeksAhead(PositionEncoding):
    """A score that depends on the last key of all."""

    claims = replace(WRONG, needs_raw_k=True)

    def term(self, q, k):
        return TimesTheLastKey(q, k)


class TimesTheLastKey(Term):
    additive = False

    def add(self, scores, rows, keys, mask):
        return scores * self.k_tokens.x[:, :, -1].sum(-1)[..., None, None]


class PeeksAheadInEvaluation(PeeksAhead):
    """Is right as it trains."""

    def term(self, q, k):
        return None if self.training else super().term(q, k)


class ReadsTheNextKeyInLongTexts(Rotary):
    """Is right up to 64 tokens."""

    def transform(self, q, k):
        if k.x.shape[2] > 64:
            k = replace(k, x=k.x + k.x.roll(-1, 2))
        return super().transform(q, k)


class CentredPerCallInEvaluation(Rotary):
    """Is right as it trains; then a query's place counts from the first of its call."""

    def transform(self, q, k):
        if not self.training:
            q = replace(q, positions=q.positions - q.positions[..., :1])
        return super().transform(q, k)


class MovesKeysTheOtherWay(Rotary):
    def move_keys(self, k, before, after):
        return super().move_keys(k, after, before)


class LeavesMovedKeys(Rotary):
    def move_keys(self, k, before, after):
        return k


class LeavesMovedValues(RoVE):
    def move_values(self, v, before, after):
        return v


class ScalesInPlace(Rotary):
    """Writes into the queries that it is given."""

    def transform(self, q, k):
        q.x.mul_(2)
        return super().transform(q, k)


class RemembersTheLongest(Rotary):
    """A table that grows with the longest call, and stays."""

    longest = 0

    def transform(self, q, k):
        type(self).longest = max(type(self).longest, k.x.shape[2])
        stretch = max(1.0, self.longest / 24)
        return super().transform(*(moved(t, t.positions / stretch) for t in (q, k)))


class KeptByShape(ALiBi):
    """A bias that stays as it is until the shape changes."""

    last = torch.zeros(0)

    def bias(self, distance):
        if self.last.shape[1:] != distance.shape:
            self.last = super().bias(distance)
        return self.last


class ReadsValues(Rotary):
    """Looks at the positions: a device would have to be waited for."""

    def transform(self, q, k):
        assert int(k.positions.max()) >= 0
        return super().transform(q, k)


class BranchesOnValues(Rotary):
    """Another way for other positions: no compiler can follow it."""

    def transform(self, q, k):
        if k.positions.sum() > 3:
            return super().transform(q, k)
        return q.x, k.x


class RoundedBias(ALiBi):
    """A table of biases kept in bfloat16, whatever the model computes in."""

    def bias(self, distance: Tensor) -> Tensor:
        return super().bias(distance).bfloat16().float()


class DistanceInTheParametersType(ALiBi):
    """A module in bfloat16 counts distances in bfloat16: beyond 256 neighbours share one."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.one = nn.Parameter(torch.ones(()))

    def bias(self, distance: Tensor) -> Tensor:
        return super().bias(distance.to(self.one.dtype)) * self.one


class NeverReset(Learned):
    """The constructor draws the weights, and nothing draws them again."""

    def __init__(self, max_positions: int, embed_dim: int) -> None:
        super().__init__(max_positions, embed_dim)
        nn.init.normal_(self.weight, std=0.02)

    def reset_parameters(self) -> None:
        pass


class NotANumberAtItself(ALiBi):
    """0 / 0 where a token looks at itself."""

    def bias(self, distance: Tensor) -> Tensor:
        return super().bias(distance) * (distance / distance)


class RootAtZero(DistanceBias):
    """The derivative of a root is infinite at zero."""

    claims = replace(DistanceBias.claims, source="nobody, 2026")

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(num_heads))

    def bias(self, distance: Tensor) -> Tensor:
        return -(self.slope[:, None, None] ** 2 * distance.abs()).sqrt()


class Detached(RootAtZero):
    """A parameter that no gradient reaches."""

    def bias(self, distance: Tensor) -> Tensor:
        return -self.slope.detach()[:, None, None] * distance.abs()


class AlwaysFloat32(Sinusoidal):
    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().embed(x, positions).float()


class BlindToOrder(RootAtZero):
    """Every pair gets the same, and nothing is said of it."""

    def bias(self, distance: Tensor) -> Tensor:
        return self.slope[:, None, None] + 0 * distance


class ClaimsTooMuch(ALiBi):
    claims = replace(ALiBi.claims, places=(2, 3))


class ValuesInSecret(Rotary):
    """Values are changed by an instance that does not say so."""

    claims = replace(Rotary.claims, places=(2, 4))

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim)
        self.claims = replace(self.claims, places=(2,))

    def transform_values(self, v):
        return 2 * v.x


class NamesNoPaper(ALiBi):
    """Right in behaviour: only a reader misses something."""

    claims = replace(ALiBi.claims, source="somebody")


class ClaimsByANumber(ALiBi):
    claims = replace(ALiBi.claims, shift_invariant=1)  # type: ignore[arg-type]


class DrawnAndForgotten(DistanceBias):
    """Slopes that the constructor draws and no state dict holds."""

    claims = replace(DistanceBias.claims, source="nobody, 2026")

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.drawn = torch.rand(num_heads, dtype=torch.float64)

    def bias(self, distance: Tensor) -> Tensor:
        return -self.drawn[:, None, None] * distance.abs()


class LastInstanceDecides(DistanceBias):
    """Slopes kept on the class: the next instance changes those of the first."""

    claims = replace(DistanceBias.claims, source="nobody, 2026")
    slopes: tuple[float, ...] = ()

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        type(self).slopes = tuple((h + 1) / num_heads for h in range(num_heads))

    def bias(self, distance: Tensor) -> Tensor:
        slopes = torch.tensor(self.slopes[: self.num_heads])
        return -slopes[:, None, None] * distance.abs()


class IgnoresHeadDim(PositionEncoding):
    """Built for heads of one size, and silent about another."""

    claims = Claims(places=(2,), source="nobody, 2026", causal_only=True)

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def transform(self, q, k):
        return q.x * 1.5, k.x * 1.5


class NeedsAMask(PositionEncoding):
    """Reads the mask also where there is none."""

    claims = Claims(places=(3,), source="nobody, 2026")

    def term(self, q, k):
        return CountsTheVisible(q, k)


class CountsTheVisible(Term):
    additive, reads_mask = False, True

    def add(self, scores, rows, keys, mask):
        return scores * mask.sum(-1, keepdim=True)


class NewMemory(PositionEncoding):
    """A buffer that nobody fills, where `spoilt`."""

    claims = WRONG

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(num_heads))

    def spoilt(self) -> bool:
        return False

    def term(self, q, k):
        def values(q_part, k_part):
            shape = (len(self.slope), len(q_part), len(k_part))
            return q_part.x.new_empty(shape) if self.spoilt() else q_part.x.new_zeros(shape)

        return PairwiseBias(q, k, values)


class NewMemoryWhereFrozen(NewMemory):
    def spoilt(self) -> bool:
        return torch.is_grad_enabled() and not self.slope.requires_grad


class NewMemoryInInference(NewMemory):
    def spoilt(self) -> bool:
        return torch.is_inference_mode_enabled()


class TrainsWithItsInputsAlone(NewMemory):
    """The parameter is followed where the queries are."""

    def term(self, q, k):
        slope = self.slope if q.x.requires_grad else self.slope.detach()
        return PairwiseBias(
            q, k, lambda q, k: slope[:, None, None] * (k.positions[None, :] - q.positions[:, None])
        )


class DividedByTheNumberOfKeys(DistanceBias):
    """A distance counts less in a longer sequence: from 700 keys on."""

    claims = replace(WRONG, places=(3,))

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads

    def term(self, q, k):
        return PairwiseBias(q, k, self.values)

    def values(self, q, k):
        distance = (q.positions[..., :, None] - k.positions[..., None, :]).abs().double()
        bias = -0.1 * distance / max(1, k.positions.shape[-1] / 700)
        return bias.view(-1, 1, *bias.shape[-2:]).expand(-1, self.num_heads, -1, -1)


class NotANumberWhereAQueryIsLast(DividedByTheNumberOfKeys):
    """NaN in texts of 301 tokens: where a text of 600 is cut in the middle, and in no whole one."""

    def values(self, q, k):
        bias = super().values(q, k)
        return bias * torch.nan if k.positions.shape[-1] == 301 else bias
