"""A textbook's rotation, table, ALiBi and T5 bias, and each with one mistake that people make.

MISTAKES names the check that finds it. Formulas are written out here; nothing is taken from posenc.
"""

import math

import torch
from torch import Tensor, nn

STILL = "position 0 leaves content as it is"
PAIRS = "pairs of channels are rotated"
SHIFT = "scores depend on distance only"
FREQUENCIES = "frequencies are those of its base and width"
PAST = "keys before a query differ by distance"
ROWS = "a distance takes its row of T5's table"
WINDOW = "a window hides what it states"
UNTOUCHED = "what it is given stays as it is"
HISTORY = "earlier calls leave no trace"
ALONE = "a token alone is the token in its sequence"
APART = "positions stay distinct"
ALIKE = "queries and keys are rotated alike"
BESIDE = "a row does not depend on the batch's farthest"
START = "its own start moves its positions"
REACH = "positions are right as far as it states"
SLOPES = "slopes of ALiBi are the authors'"
CAST = "module.bfloat16() keeps positions"
ACTIVATIONS = "bfloat16 activations keep positions"
USED = "positions that it takes are used"

HEADS = 8


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)


class Rotary(nn.Module):
    """Right: queries and keys of (batch, heads, tokens, dim), in halves."""

    returns, width = "rotate", 64

    def __init__(self, dim: int = 64, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def inv_freq(self) -> Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def places(self, positions: Tensor) -> Tensor:
        return positions

    def angles(self, positions: Tensor) -> Tensor:
        return self.places(positions)[..., None].float() * self.inv_freq()

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(positions)
        angles = torch.cat([angles, angles], dim=-1)
        if angles.ndim == 3:  # (batch, tokens, dim)
            angles = angles[:, None]
        return angles.cos(), angles.sin()

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (t.to(x.dtype) for t in self.table(positions))
        return x * cos + rotate_half(x) * sin

    def queries(self, q: Tensor, positions: Tensor) -> Tensor:
        return self.rotated(q, positions)

    def keys(self, k: Tensor, positions: Tensor) -> Tensor:
        return self.rotated(k, positions)

    def forward(self, q, k, positions):
        return self.queries(q, positions), self.keys(k, positions)


class KeysInterleaved(Rotary):
    def keys(self, k, positions):
        angles = self.angles(positions).repeat_interleave(2, dim=-1)
        angles = angles[:, None] if angles.ndim == 3 else angles
        return k * angles.cos().to(k.dtype) + rotate_neighbours(k) * angles.sin().to(k.dtype)


class HalvesWithInterleavedAngles(Rotary):
    def table(self, positions):
        angles = self.angles(positions).repeat_interleave(2, dim=-1)
        angles = angles[:, None] if angles.ndim == 3 else angles
        return angles.cos(), angles.sin()


class Exchanged(Rotary):
    def table(self, positions):
        cos, sin = super().table(positions)
        return sin, cos


class KeysExchanged(Rotary):
    def keys(self, k, positions):
        cos, sin = (t.to(k.dtype) for t in self.table(positions))
        return k * sin + rotate_half(k) * cos


class NoMinus(Rotary):
    def rotated(self, x, positions):
        cos, sin = (t.to(x.dtype) for t in self.table(positions))
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([b, a], dim=-1) * sin


class NoMinusOfKeys(Rotary):
    def keys(self, k, positions):
        return NoMinus.rotated(self, k, positions)  # type: ignore[arg-type]


class KeysBackwards(Rotary):
    def keys(self, k, positions):
        return self.rotated(k, -positions)


class OtherBase(Rotary):
    def inv_freq(self):
        return 1000.0 ** (-torch.arange(0, self.dim, 2).float() / self.dim)


class OtherWidth(Rotary):
    def inv_freq(self):
        return self.base ** (-torch.arange(0, self.dim, 2).float() / (2 * self.dim))


class NotTwice(Rotary):
    """i / dim in place of 2i / dim."""

    def inv_freq(self):
        return self.base ** (-torch.arange(self.dim // 2).float() / self.dim)


class FromOne(Rotary):
    def inv_freq(self):
        return self.base ** (-torch.arange(2, self.dim + 2, 2).float() / self.dim)


class Halved(Rotary):
    def inv_freq(self):
        return super().inv_freq() / 2


class OnePair(Rotary):
    def inv_freq(self):
        exact = super().inv_freq()
        exact[17] *= 1.005
        return exact


class PairsExchanged(Rotary):
    def inv_freq(self):
        exact = super().inv_freq()
        return torch.cat([exact[:-2], exact[[-1, -2]]])


class PairsReversed(Rotary):
    def inv_freq(self):
        return super().inv_freq().flip(0)


class SlowedDown(Rotary):
    """Of its own: slower last pairs, as of a method for long texts that it does not name."""

    def inv_freq(self):
        return super().inv_freq() / torch.where(torch.arange(32) > 25, 4.0, 1.0)


class CoarseFrequencies(Rotary):
    def inv_freq(self):
        return super().inv_freq().bfloat16().float()


class CoarseAngles(Rotary):
    def angles(self, positions):
        return super().angles(positions).bfloat16().float()


class LaterQueries(Rotary):
    def queries(self, q, positions):
        return self.rotated(q, positions + 1)


class LaterBoth(Rotary):
    def places(self, positions):
        return positions + 1


class Ignored(Rotary):
    def places(self, positions):
        return torch.arange(positions.shape[-1])


class Bytes(Rotary):
    def places(self, positions):
        return positions.to(torch.uint8)


class Shorts(Rotary):
    def places(self, positions):
        return positions.to(torch.int16)


class Clamped(Rotary):
    max_position_embeddings = 2048

    def places(self, positions):
        return positions.clamp(max=511)


class FirstRow(Rotary):
    def places(self, positions):
        return positions if positions.ndim == 1 else positions[:1].expand_as(positions)


class Sticky(Rotary):
    """The table of the first call serves every later one of the same length."""

    kept: tuple[Tensor, Tensor] | None = None

    def table(self, positions):
        if self.kept is None or self.kept[0].shape[-2] != positions.shape[-1]:
            self.kept = super().table(positions)
        return self.kept


class KeptInItsDtype(Rotary):
    kept: Tensor | None = None

    def rotated(self, x, positions):
        if self.kept is None:
            self.kept = self.inv_freq().to(x.dtype)
        angles = self.places(positions)[..., None].float() * self.kept.float()
        angles = torch.cat([angles, angles], dim=-1)
        angles = angles[:, None] if angles.ndim == 3 else angles
        return x * angles.cos().to(x.dtype) + rotate_half(x) * angles.sin().to(x.dtype)


class KeptForItsLastPosition(Rotary):
    """Makes its table again for another last position only."""

    kept: tuple[int, tuple[Tensor, Tensor]] | None = None

    def table(self, positions):
        last = int(positions.max())
        if self.kept is None or self.kept[0] != last or len(self.kept[1][0]) != len(positions):
            self.kept = (last, super().table(positions))
        return self.kept[1]


class BufferOfFrequencies(Rotary):
    """module.bfloat16() rounds it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Buffer(super().inv_freq())

    def inv_freq(self):
        return self.kept.float()


class InPlace(Rotary):
    def queries(self, q, positions):
        return q.copy_(self.rotated(q, positions))


class PositionsInPlace(Rotary):
    def places(self, positions):
        return positions.sub_(positions.min())


class QueriesGrow(Rotary):
    """Scores double over 4,096 tokens, which is nothing over a few."""

    def queries(self, q, positions):
        return self.rotated(q, positions) * (1 + positions.float() / 4096)[..., None]


class XPos(Rotary):
    """Right: queries grow and keys shrink."""

    powers = (1.0, -1.0)

    def scaled(self, x: Tensor, positions: Tensor, power: float) -> Tensor:
        i = torch.arange(0, self.dim, 2).float() / self.dim
        scale = ((i + 0.4) / 1.4) ** (power * positions[..., None].float() / 512)
        scale = torch.cat([scale, scale], dim=-1)
        return x * (scale[:, None] if scale.ndim == 3 else scale).to(x.dtype)

    def queries(self, q, positions):
        return self.scaled(self.rotated(q, positions), positions, self.powers[0])

    def keys(self, k, positions):
        return self.scaled(self.rotated(k, positions), positions, self.powers[1])


class XPosAlike(XPos):
    powers = (1.0, 1.0)


class XPosFromTheMiddle(XPos):
    """Right: as torchscale's, scales from the middle of the keys that it is given."""

    def forward(self, q, k):
        places = torch.arange(k.shape[-2])
        from_middle = places - len(places) // 2
        last = slice(-q.shape[-2], None)
        queries = self.scaled(self.rotated(q, places[last]), from_middle[last], 1.0)
        return queries, self.scaled(self.rotated(k, places), from_middle, -1.0)


class OneOfTwoBases(Rotary):
    """Right: as the layers with a window of a model with a base for each kind."""

    def __init__(self, rope_theta: float = 1e6, rope_local_base_freq: float = 10000.0) -> None:
        super().__init__(64, rope_local_base_freq)
        del self.base
        self.rope_theta, self.rope_local_base_freq = rope_theta, rope_local_base_freq

    def inv_freq(self):
        return self.rope_local_base_freq ** (-torch.arange(0, self.dim, 2).float() / self.dim)


class PartOfItsChannels(Rotary):
    """Right: rotates the first half of the channels."""

    def __init__(self, dim: int = 64, partial_rotary_factor: float = 0.5) -> None:
        super().__init__(int(dim * partial_rotary_factor))

    def rotated(self, x, positions):
        return torch.cat([super().rotated(x[..., : self.dim], positions), x[..., self.dim :]], -1)


class PartWithFrequenciesOfAll(PartOfItsChannels):
    def inv_freq(self):
        return self.base ** (-torch.arange(0, self.dim, 2).float() / self.width)


class Counting(nn.Module):
    """Right: rotates x, counts tokens itself, and goes on after `offset` in decoding."""

    returns, width = "rotate", 64

    def __init__(self, dim: int = 64, base: float = 10000.0) -> None:
        super().__init__()
        self.inner = Rotary(dim, base)

    def start(self, x: Tensor, offset: int) -> int:
        return offset

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        first = self.start(x, offset)
        return self.inner.rotated(x, torch.arange(x.shape[-2]) + first)


class LaterInDecoding(Counting):
    def start(self, x, offset):
        return offset + 1 if offset else 0


class NoOffset(Counting):
    def start(self, x, offset):
        return 0


class CountsHeads(Counting):
    def forward(self, x, offset=0):
        return self.inner.rotated(x.transpose(1, 2), torch.arange(x.shape[1])).transpose(1, 2)


class Learned(nn.Module):
    """Right: rows of a table."""

    returns, width = "add", 32

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(1024, 32)

    def places(self, positions: Tensor) -> Tensor:
        return positions

    def forward(self, x, positions):
        return x + self.rows(self.places(positions)).to(x.dtype)


class Sinusoids(nn.Module):
    """Right: sines and cosines of neighbouring channels."""

    returns, width = "add", 64

    def __init__(self, dim: int = 64, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base

    def inv_freq(self) -> Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def forward(self, x, positions):
        angles = positions[..., None].float() * self.inv_freq()
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return x + table.to(x.dtype)


class SinusoidsDownToBase(Sinusoids):
    """Right: of tensor2tensor, whose slowest pair has the frequency 1 / base."""

    def inv_freq(self):
        half = self.dim // 2
        return self.base ** (-torch.arange(half).float() / (half - 1))


class SinusoidsOfOtherBase(Sinusoids):
    def inv_freq(self):
        return 1000.0 ** (-torch.arange(0, self.dim, 2).float() / self.dim)


class SinusoidsNotTwice(Sinusoids):
    def inv_freq(self):
        return self.base ** (-torch.arange(self.dim // 2).float() / self.dim)


class LearnedBytes(Learned):
    def places(self, positions):
        return positions.to(torch.uint8).long()


class LearnedInPlace(Learned):
    def forward(self, x, positions):
        x += self.rows(positions).to(x.dtype)
        return x


class Alibi(nn.Module):
    """Right: the authors' slopes of eight heads."""

    returns, width, heads = "scores", 64, HEADS

    def slopes(self) -> Tensor:
        return 2.0 ** -torch.arange(1, self.heads + 1).float()

    def distances(self, n: int) -> Tensor:
        return (torch.arange(n)[:, None] - torch.arange(n)).abs().float()

    def forward(self, scores):
        far = self.distances(scores.shape[-1])
        return scores - (self.slopes()[:, None, None] * far).to(scores.dtype)


class AlibiFromZero(Alibi):
    def slopes(self):
        return 2.0 ** -torch.arange(self.heads).float()


class AlibiOfTwelve(Alibi):
    heads = 12

    def slopes(self):
        return 2.0 ** (-8 * torch.arange(1, 13).float() / 12)


class AlibiGrows(Alibi):
    def slopes(self):
        return -super().slopes()


class AlibiReversed(Alibi):
    def slopes(self):
        return super().slopes().flip(0)


class AlibiOneHead(Alibi):
    def slopes(self):
        slopes = super().slopes()
        slopes[3] *= 1.02
        return slopes


class AlibiEarlierTooFar(Alibi):
    def distances(self, n):
        far = super().distances(n)
        return far + (far > 0)


class AlibiCoarse(Alibi):
    def distances(self, n):
        return super().distances(n).bfloat16().float()


class AlibiOfBothSides(Alibi):
    """Rewards keys ahead, and says that queries see them."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = False

    def distances(self, n):
        return (torch.arange(n)[:, None] - torch.arange(n)).float()


class AlibiOfBothSidesInWords(Alibi):
    """A bidirectional ALiBi, for an encoder."""

    distances = AlibiOfBothSides.distances


class T5(nn.Module):
    """Right: buckets of earlier keys, as in a decoder."""

    returns, width, sign = "bias", 64, 1

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(32, HEADS)

    def places(self, count: int) -> Tensor:
        return torch.arange(count)

    def forward(self, q_len: int, kv_len: int) -> Tensor:
        queries, keys = self.places(kv_len)[-q_len:, None], self.places(kv_len)
        far = (self.sign * (queries - keys)).clamp(min=0)
        log = (far.float() / 16).clamp(min=1).log() / math.log(128 / 16) * 16
        bucket = torch.where(far < 16, far, (16 + log.long()).clamp(max=31))
        return self.rows(bucket).permute(2, 0, 1)


class T5Backwards(T5):
    sign = -1


class T5OneTooFar(T5):
    def forward(self, q_len: int, kv_len: int) -> Tensor:
        whole = super().forward(kv_len + 1, kv_len + 1)
        return whole[:, -q_len:, :-1]


class T5Coarse(T5):
    """Rounds positions, and so the distances of late queries only."""

    def places(self, count):
        return torch.arange(count).bfloat16().long()


class T5OfBothSides(nn.Module):
    """Right: buckets of earlier keys, and others of later ones, as in an encoder."""

    returns, width = "bias", 64

    def __init__(self, bidirectional: bool = True) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.rows = nn.Embedding(32, HEADS)

    def is_second_half(self, keys_minus_queries: Tensor) -> Tensor:
        return keys_minus_queries > 0

    def forward(self, q_len: int, kv_len: int) -> Tensor:
        queries, keys = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
        far = (queries - keys).abs()
        log = (far.float() / 8).clamp(min=1).log() / math.log(128 / 8) * 8
        bucket = torch.where(far < 8, far, (8 + log.long()).clamp(max=15))
        return self.rows(bucket + 16 * self.is_second_half(keys - queries)).permute(2, 0, 1)


class T5SidesExchanged(T5OfBothSides):
    def is_second_half(self, keys_minus_queries):
        return keys_minus_queries < 0


class T5OneHalf(T5OfBothSides):
    def is_second_half(self, keys_minus_queries):
        return torch.zeros_like(keys_minus_queries)


class T5OfDecoder(T5OfBothSides):
    """Takes rows of both sides and says that it does not."""

    def __init__(self) -> None:
        super().__init__(bidirectional=False)


class Window(nn.Module):
    """Right: a query sees as many keys as the window says, its own included."""

    returns, width, seen = "bias", 64, 16

    def __init__(self, window: int = 16) -> None:
        super().__init__()
        self.window = window

    def num_seen(self, q_len: int) -> int:
        return self.seen

    def forward(self, q_len: int, kv_len: int) -> Tensor:
        queries, keys = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
        far = queries - keys
        hidden = (far < 0) | (far >= self.num_seen(q_len))
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        return (-slopes[:, None, None] * far.abs()).masked_fill(hidden, -math.inf)


class WindowOneMore(Window):
    """A query sees `window` keys, itself included."""

    seen = 17


class WindowOneLess(Window):
    seen = 15


class WindowShorterInDecoding(Window):
    def num_seen(self, q_len):
        return 15 if q_len == 1 else 16


RIGHT = (
    Rotary,
    XPos,
    XPosFromTheMiddle,
    OneOfTwoBases,
    PartOfItsChannels,
    Counting,
    Sinusoids,
    SinusoidsDownToBase,
    SlowedDown,
    Learned,
    Alibi,
    T5,
    T5OfBothSides,
    Window,
)
OF_THEIR_BASE = (
    Rotary,
    XPos,
    XPosFromTheMiddle,
    OneOfTwoBases,
    PartOfItsChannels,
    Counting,
    Sinusoids,
    SinusoidsDownToBase,
)
"""Right ones whose frequencies are those of the base that they state."""
MISTAKES = {
    KeysInterleaved: ALIKE,
    HalvesWithInterleavedAngles: PAIRS,
    Exchanged: STILL,
    KeysExchanged: ALIKE,
    NoMinus: PAIRS,
    NoMinusOfKeys: PAIRS,
    KeysBackwards: ALIKE,
    OtherBase: FREQUENCIES,
    OtherWidth: FREQUENCIES,
    PartWithFrequenciesOfAll: FREQUENCIES,
    NotTwice: FREQUENCIES,
    FromOne: FREQUENCIES,
    Halved: FREQUENCIES,
    OnePair: FREQUENCIES,
    PairsExchanged: FREQUENCIES,
    PairsReversed: FREQUENCIES,
    SinusoidsOfOtherBase: FREQUENCIES,
    SinusoidsNotTwice: FREQUENCIES,
    CoarseFrequencies: FREQUENCIES,
    CoarseAngles: APART,
    LaterQueries: ALIKE,
    LaterBoth: STILL,
    Ignored: USED,
    Bytes: REACH,
    Shorts: REACH,
    Clamped: REACH,
    FirstRow: BESIDE,
    Sticky: HISTORY,
    KeptInItsDtype: HISTORY,
    KeptForItsLastPosition: HISTORY,
    BufferOfFrequencies: CAST,
    InPlace: UNTOUCHED,
    PositionsInPlace: UNTOUCHED,
    QueriesGrow: SHIFT,
    XPosAlike: SHIFT,
    LaterInDecoding: ALONE,
    NoOffset: START,
    LearnedBytes: APART,
    LearnedInPlace: UNTOUCHED,
    AlibiFromZero: SLOPES,
    AlibiOfTwelve: SLOPES,
    AlibiGrows: SLOPES,
    AlibiReversed: SLOPES,
    AlibiOneHead: SLOPES,
    AlibiEarlierTooFar: SLOPES,
    AlibiCoarse: SLOPES,
    AlibiOfBothSides: SLOPES,
    AlibiOfBothSidesInWords: SLOPES,
    T5Backwards: PAST,
    T5Coarse: PAST,
    T5OneTooFar: ROWS,
    T5SidesExchanged: ROWS,
    T5OneHalf: ROWS,
    T5OfDecoder: ROWS,
    WindowOneMore: WINDOW,
    WindowOneLess: WINDOW,
    WindowShorterInDecoding: ALONE,
}
"""The check that finds each mistake; others may fail with it. `CountsHeads` is refused instead."""
