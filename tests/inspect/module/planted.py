"""Small modules of our own, right ones and wrong ones: each wrong one has one known mistake."""

import torch
from torch import Tensor, nn


def frequencies(dim: int) -> Tensor:
    return 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Neighbouring channels of x (..., len, dim) turned by angle (len, dim / 2)."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class CosSin(nn.Module):
    """Right: angles in float32, whatever the module was cast to."""

    returns, width = "cos-sin", 16

    max_position_embeddings = 4096

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x, position_ids):
        angle = position_ids[..., None].float() * frequencies(self.dim)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class Turned(nn.Module):
    """Right: turns queries and keys, and is asked for any positions."""

    returns, width = "rotate", 16

    def forward(self, q, k, positions):
        angle = positions[..., None].float() * frequencies(q.shape[-1])
        return turn(q, angle), turn(k, angle)


class Tutorial(nn.Module):
    """Right: adds a table to (len, batch, width), as in the tutorials."""

    returns, width = "add", 32

    def __init__(self, dim: int = 32, max_len: int = 512) -> None:
        super().__init__()
        angle = torch.arange(max_len)[:, None] * frequencies(dim)
        self.table = nn.Buffer(torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: len(x)].to(x.dtype)


class Table(nn.Module):
    """Right: learned rows, with an offset and a first real token for each row."""

    returns, width = "add", 16

    def __init__(self, dim: int = 16, rows: int = 300) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, dim)

    def forward(self, x, positions=None, starts=None, offset=0):
        positions = torch.arange(x.shape[1]) + offset if positions is None else positions
        if starts is not None:
            positions = (positions - starts[:, None]).clamp(min=0)
        return x + self.emb(positions).to(x.dtype)


class Alibi(nn.Module):
    """Right: the authors' slopes, by distance."""

    returns, width = "bias", 64

    slopes = (0.5, 0.25, 0.125, 0.0625, 0.03125, 2**-6, 2**-7, 2**-8)

    def forward(self, q_len: int, kv_len: int, dtype: torch.dtype) -> Tensor:
        far = torch.arange(kv_len) - torch.arange(kv_len - q_len, kv_len)[:, None]
        return -(torch.tensor(self.slopes)[:, None, None] * far.abs()).to(dtype)


class CachedKeys(nn.Module):
    """Right: scales queries up and keys down by where they stand, from a fixed centre."""

    returns, width = "rotate", 16

    def centre(self, count: int) -> int:
        return 0

    def side(self, t: Tensor, places: Tensor, power: float) -> Tensor:
        angle = places[:, None].float() * frequencies(t.shape[-1])
        scale = 0.9 ** ((places - self.centre(len(places))).float() / 64 * power)
        return turn(t, angle) * scale[:, None]

    def forward(self, q, k):
        places = torch.arange(k.shape[-2])
        return self.side(q, places[-q.shape[-2] :], 1.0), self.side(k, places, -1.0)


class Rebuilt(nn.Module):
    """Right: if max_seq_len is exceeded, the table is recomputed."""

    returns, width = "rotate", 16

    def __init__(self, dim: int = 16, max_seq_len: int = 256) -> None:
        super().__init__()
        self.dim, self.max_seq_len = dim, max_seq_len
        self.table = self.angles(max_seq_len)

    def angles(self, count: int) -> Tensor:
        return torch.arange(count)[:, None] * frequencies(self.dim)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] > len(self.table):
            self.table = self.angles(x.shape[-2])
        return turn(x, self.table[: x.shape[-2]])


class EndsEarly(Rebuilt):
    """If max_seq_len is exceeded, the table is recomputed. (Wrong: it is not.)"""

    def forward(self, x: Tensor) -> Tensor:
        return turn(x, self.table[: x.shape[-2]])


class MadeInDtype(CosSin):
    """Wrong: positions in the activations' dtype."""

    def forward(self, x, position_ids):
        angle = position_ids[..., None].to(x.dtype) * frequencies(self.dim).to(x.dtype)
        return angle.cos(), angle.sin()


class PoisonedCache(CosSin):
    """Wrong: keeps what the last call computed, in that call's dtype."""

    kept: Tensor | None = None

    def forward(self, x, position_ids):
        count = position_ids.max() + 1
        if self.kept is None or len(self.kept) < count:
            self.kept = (torch.arange(count)[:, None] * frequencies(self.dim)).to(x.dtype)
        assert self.kept is not None
        angle = self.kept[position_ids]
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class StalePositions(CosSin):
    """Wrong: keeps the angles of the last call of the same length, at whatever positions."""

    kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x, position_ids):
        if self.kept is None or self.kept[0].shape[-2] != position_ids.shape[-1]:
            self.kept = super().forward(x.float(), position_ids)
        return self.kept[0].to(x.dtype), self.kept[1].to(x.dtype)


class OtherWidths(CosSin):
    """Wrong: a cosine is missing."""

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return cos[..., :-1], sin


class OwnCentre(CachedKeys):
    """Wrong: each side is scaled from the middle of its own length."""

    def side(self, t, places, power):
        angle = places[:, None].float() * frequencies(t.shape[-1])
        scale = 0.9 ** ((places - len(places) // 2).float() / 64 * power)
        return turn(t, angle) * scale[:, None]


class Recentred(nn.Module):
    """Wrong: a table that grows is scaled from its new middle, while old keys keep the old one."""

    returns, width = "rotate", 16

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = max(self.count, x.shape[-2])
        places = torch.arange(x.shape[-2])
        scale = 0.9 ** ((places - self.count // 2).float() / 64)
        return turn(x, places[:, None] * frequencies(x.shape[-1])) * scale[:, None]


class CastFrequencies(CosSin):
    """Wrong: its frequencies are a buffer, which module.bfloat16() rounds."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.inv_freq = nn.Buffer(frequencies(dim))

    def forward(self, x, position_ids):
        angle = position_ids[..., None].float() * self.inv_freq.float()
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class NoBatch(Table):
    """Wrong: takes the first real token of each row, and cannot use it."""

    def forward(self, x, positions=None, starts=None, offset=0):
        positions = torch.arange(x.shape[1]) + offset if positions is None else positions
        if starts is not None:
            positions = (positions - starts[:, None]).clamp(min=0)
        return x + self.emb.weight.index_select(0, positions).to(x.dtype)


class WrongOffset(Table):
    """Wrong: counts its offset twice."""

    def forward(self, x, positions=None, starts=None, offset=0):
        return super().forward(x, positions, starts, 2 * offset)


class KeyedOnShape(nn.Module):
    """Wrong: returns what it returned for this shape, whatever the dtype."""

    returns, width = "add", 16

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[torch.Size, Tensor] = {}

    def forward(self, tensor: Tensor) -> Tensor:
        if tensor.shape not in self.kept:
            angle = torch.arange(tensor.shape[1])[:, None] * frequencies(tensor.shape[-1])
            self.kept[tensor.shape] = torch.cat([angle.sin(), angle.cos()], -1).to(tensor.dtype)
        return self.kept[tensor.shape].expand_as(tensor)


class FollowsLongest(CosSin):
    """Wrong with a cache: frequencies follow the longest row of the batch."""

    def forward(self, x, position_ids):
        stretch = max(1.0, (position_ids.max().item() + 1) / 64)
        angle = position_ids[..., None].float() * frequencies(self.dim) / stretch
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class FirstRow(CosSin):
    """Wrong with a batch: all rows have the positions of the first."""

    def forward(self, x, position_ids):
        return super().forward(x, position_ids.view(-1, x.shape[-2])[:1].expand(len(x), -1))


class FarStated(CosSin):
    """Wrong: float32 products, for a million positions."""

    max_position_embeddings = 2**20


class ByKey(nn.Module):
    """Wrong: a bias on the key alone, rounded to the activations' dtype."""

    returns, width = "bias", 64

    def forward(self, n: int, dtype: torch.dtype) -> Tensor:
        return (torch.tensor(Alibi.slopes)[:, None, None] * torch.arange(n)).to(dtype)


class PlainSlopes(Alibi):
    """Wrong: 2^(-8h/H) for twelve heads."""

    slopes = tuple(2 ** (-8 * h / 12) for h in range(1, 13))


class Counts(nn.Module):
    """Wrong under a compiler: a Python number that changes with every length."""

    returns, width = "rotate", 16

    def __init__(self) -> None:
        super().__init__()
        self.last = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] != self.last:
            self.last = int(x.shape[-2])
        return turn(x, torch.arange(self.last)[:, None] * frequencies(x.shape[-1]))


class HalfAngles(nn.Module):
    """Wrong in every dtype alike: the angle itself is rounded to bfloat16."""

    returns, width = "rotate", 16

    def forward(self, x, positions):
        angle = positions[:, None].bfloat16() * frequencies(x.shape[-1]).bfloat16()
        return turn(x, angle.float())


class MixedLayouts(nn.Module):
    """Wrong: neighbours exchanged, with the cosines and sines of halves."""

    returns, width = "rotate", 16

    def forward(self, q, k, positions):
        angle = positions[..., None].float() * frequencies(q.shape[-1])
        cos, sin = (t.repeat(1, 2) for t in (angle.cos(), angle.sin()))

        def mixed(x: Tensor) -> Tensor:
            return x * cos + torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2) * sin

        return mixed(q), mixed(k)


class KeysByHalves(Turned):
    """Wrong: queries pair neighbours, keys pair halves."""

    def forward(self, q, k, positions):
        apart = k.unflatten(-1, (2, -1)).mT.flatten(-2)
        turned, keys = super().forward(q, apart, positions)
        return turned, keys.unflatten(-1, (-1, 2)).mT.flatten(-2)


class KeysOneLater(Turned):
    """Wrong: keys stand one place after their queries."""

    def forward(self, q, k, positions):
        return super().forward(q, k, positions)[0], super().forward(q, k, positions + 1)[1]


class ByCounts(nn.Module):
    """Right, as T5's: told how many queries and keys, it takes the queries for the first."""

    returns, width = "bias", 64

    def forward(self, query_length: int, key_length: int) -> Tensor:
        far = torch.arange(key_length) - torch.arange(query_length)[:, None]
        return -(2.0 ** -torch.arange(1.0, 4)[:, None, None] * far.abs().clamp(max=40))


class IgnoresPositions(Turned):
    """Wrong: takes positions, and counts from zero."""

    def forward(self, q, k, positions=None):
        return super().forward(q, k, torch.arange(q.shape[-2]))


class AddsMask(nn.Module):
    """No position module: adds its mask."""

    returns, width = "add", 16

    def forward(self, x, attention_mask=None):
        return x if attention_mask is None else x + attention_mask[..., None]


class Noise(nn.Module):
    """Random."""

    returns, width = "add", 16

    def forward(self, x):
        return x + torch.rand_like(x)


class NeedsData(nn.Module):
    """Nothing says what `graph` is."""

    returns, width = "add", 16

    def forward(self, graph, position_ids):
        return graph[position_ids]


class ResetsBad(nn.Module):
    def __init__(self) -> None:
        raise RuntimeError("no licence file")
