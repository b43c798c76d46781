"""Claims about biases on the scores: T5's buckets, ALiBi's slopes, forgetting."""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.claims.claim import IDENTITY, PARTLY, Group, Measured, amount
from posenc.attend.attention_layer import Attention
from posenc.encodings import ALiBi, FoX, PositionEncoding, T5Bias

CLAIMS = Group()

_T5 = "Raffel et al. 2020, arXiv:1910.10683, section 2.1"
_ALIBI = "Press et al. 2022, arXiv:2108.12409, section 3"


def _buckets(bidirectional: bool = False, ahead: bool = False) -> Tensor:
    """Return the bucket of each distance 0 .. 299 in the past, or, with ahead, of 1 .. 300 in the
    future."""
    distances = -torch.arange(1, 301) if ahead else torch.arange(300)
    return T5Bias(1, bidirectional=bidirectional).bucket(distances)


@CLAIMS.add("T5's buckets go on to distance 128 and beyond")
def _saturates() -> Measured:
    ends = [int((b == b[-1]).nonzero()[0]) for b in (_buckets(), _buckets(True))]
    text = f"the last bucket begins at {ends[0]} (causal) and at {ends[1]} (bidirectional)"
    return text, ends == [128, 128]


@CLAIMS.add("T5 has 32 exact buckets")
def _exact_buckets() -> Measured:
    sides = (_buckets(), _buckets(True), _buckets(True, ahead=True))
    past, both, ahead = (int((b.bincount() == 1).sum()) for b in sides)
    text = (
        f"{past} of 32 hold one distance (causal); bidirectional {both} of the past, whose first "
        f"is distance 0, and {ahead} of the future"
    )
    return text, past == 32


@CLAIMS.add("T5's offset of half the buckets goes to the past")
def _future_offset() -> Measured:
    encoding = T5Bias(1, bidirectional=True)
    past, future = encoding.bucket(torch.tensor([1, -1])).tolist()
    return f"the past neighbour is in bucket {past}, the next in {future}", past > 16


def _other_formula(log_base_distance: bool, rounded: bool) -> int:
    """Count how many of 300 distances get another bucket from a changed formula."""
    wrong = 0
    for distance, bucket in enumerate(_buckets().tolist()):
        if distance < 16:
            continue
        if log_base_distance:
            share = math.log(distance) / math.log(128)
        else:
            share = math.log(distance / 16) / math.log(128 / 16)
        step = round(share * 16) if rounded else math.floor(share * 16 + 1e-9)
        wrong += min(31, 16 + step) != bucket
    return wrong


@CLAIMS.add("T5's buckets are 16 + 16 ln(x) / ln(128)")
def _logarithm() -> Measured:
    wrong = _other_formula(True, False)
    right = _other_formula(False, False)
    text = f"{wrong} of 300 distances get another bucket; with ln(x/16) / ln(128/16) {right}"
    return text, wrong == 0


@CLAIMS.add("T5 rounds to the nearest bucket")
def _rounding() -> Measured:
    wrong = _other_formula(False, True)
    return f"{wrong} of 300 distances get another bucket; T5 truncates", wrong == 0


@CLAIMS.add("T5 divides q . k by sqrt(head_dim)")
def _t5_scale() -> Measured:
    scale = T5Bias(8, unscaled=True).scale(64)
    return f"q . k is multiplied by {scale:g}", scale == 64**-0.5


def _tables_of_t5() -> list[int]:
    """Return the layers of a stock six-layer T5 encoder that hold a table."""
    from transformers import T5Config, T5EncoderModel

    with torch.device("meta"):
        model = T5EncoderModel(T5Config(vocab_size=8, d_model=16, d_kv=4, d_ff=8, num_layers=6))
    names = [name for name, _ in model.named_parameters() if "relative_attention_bias" in name]
    return [int(name.partition("block.")[2].partition(".")[0]) for name in names]


@CLAIMS.add("Every layer of T5 has its own table", _T5)
def _t5_tables() -> Measured:
    held = _tables_of_t5()
    shown = ", ".join(map(str, held))
    return f"in transformers' T5 of 6 layers a table stands in layer {shown} only", len(held) == 6


@CLAIMS.add("ALiBi's slopes at 12 heads are 2^(-8h/12)")
def _twelve_heads() -> Measured:
    found = ", ".join(f"{s:.4g}" for s in ALiBi(12).slopes)
    wrong = [2 ** (-8 * h / 12) for h in range(1, 13)]
    same = all(math.isclose(a, b) for a, b in zip(ALiBi(12).slopes, wrong, strict=True))
    return f"the authors' code gives {found}", same


@CLAIMS.add("ALiBi's slopes are learned")
def _learned_slopes() -> Measured:
    count = sum(p.numel() for p in ALiBi(8).parameters())
    return f"{count} parameters", count > 0


@CLAIMS.add("ALiBi adds +m (i - j) to the score of query i and key j")
def _sign() -> Measured:
    bias = ALiBi(8).bias(torch.tensor([10]))[0].item()
    return f"first head, 10 tokens back: {bias:g} logits", bias > 0


@CLAIMS.add(
    "ALiBi's first slope is 2^-(2^-log2(H + 3))",
    "Kazemnejad et al. 2023, arXiv:2305.19466, appendix",
)
def _kazemnejad() -> Measured:
    printed = 2 ** -(2 ** -math.log2(8 + 3))
    text = f"it gives {printed:.3f} at 8 heads; the authors' first slope is {ALiBi(8).slopes[0]:g}"
    return text, math.isclose(printed, ALiBi(8).slopes[0])


@torch.no_grad()
def _told_apart(encoding: PositionEncoding) -> int:
    """Count how many of the 120 orders of five words an encoder layer distinguishes by each word's
    state, ignoring its place."""
    torch.manual_seed(0)
    layer = Attention(32, 8).double()
    words = torch.randn(5, 32, dtype=torch.float64)
    found = set()
    for order in itertools.permutations(range(5)):
        places = torch.tensor(order)
        out = layer(words[places][None], torch.arange(5), encoding=encoding)[0]
        found.add(tuple((out[places.argsort()] * 1e6).round().flatten().tolist()))
    return len(found)


@CLAIMS.add("Symmetric ALiBi gives an encoder the order of words")
def _order_blind() -> Measured:
    symmetric, sided = _told_apart(ALiBi(8)), _told_apart(ALiBi(8, form="left_right"))
    text = (
        f"of 120 orders of five words it tells {symmetric} apart: only a sentence and its mirror "
        f"image look the same. The form of left and right heads tells {sided} apart"
    )
    return text, PARTLY if symmetric == 60 else symmetric == 120


def _in_bfloat16(bias: Tensor) -> Tensor:
    return bias.bfloat16().double()


@CLAIMS.add("m j on the key alone is as good as -m (i - j)", _ALIBI)
def _key_only() -> Measured:
    j, i = torch.arange(2000, dtype=torch.float64), 1999
    keys, rows = 0.5 * j, -0.5 * (i - j)
    exact = (keys.softmax(0) - rows.softmax(0)).abs().max().item()
    rounded = _in_bfloat16(keys)
    step = rounded.unique().diff().max().item()
    off = (rounded.softmax(0) - _in_bfloat16(rows).softmax(0)).abs().max().item()
    text = (
        f"in float64 weights differ by {amount(exact)}; in bfloat16 0.5 j has steps of {step:g} "
        f"logits near position 2,000 and weights are off by {off:.2f}"
    )
    return text, off < 1e-3


def _get_alibi_biases(positions: Tensor) -> Tensor:
    """Return the bias of a tutorial's function: a number per query, the same for all keys."""
    return -0.5 * positions[:, None]


@CLAIMS.add("ALiBi may add one number per query, as a tutorial's get_alibi_biases does")
def _per_query() -> Measured:
    torch.manual_seed(0)
    scores, at = torch.randn(64, 64, dtype=torch.float64), torch.arange(64, dtype=torch.float64)
    biases = (torch.zeros(64, 64), _get_alibi_biases(at), -0.5 * (at[:, None] - at))
    hidden = at[:, None] < at
    plain, said, meant = ((scores + b).masked_fill(hidden, -torch.inf).softmax(-1) for b in biases)
    moved, far = ((weights - plain).abs().max().item() for weights in (said, meant))
    text = (
        "a number that a row's keys share cancels in the softmax: weights move by "
        f"{amount(moved)}, by ALiBi's bias up to {amount(far)}"
    )
    return text, moved > 1e-9


@CLAIMS.add("CABLE is FoX with the gate's sign turned", "arXiv:2503.08067; arXiv:2503.02130")
def _cable() -> Measured:
    torch.manual_seed(0)
    fox = FoX(16, 1).double()
    x = torch.randn(1, 1000, 16, dtype=torch.float64)
    with torch.no_grad():
        cable = -F.softplus(-fox.gate(x)).cumsum(1)[..., 0]
        gap = (fox.state(x, torch.arange(1000))[:, 0] - cable).abs().max().item()
    text = f"-softplus(-a) is ln sigmoid(a): posenc's FoX and CABLE's sum differ by {amount(gap)}"
    return text, IDENTITY if gap < 1e-9 else False
