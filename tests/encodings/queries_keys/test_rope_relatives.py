"""xPos, PoPE, query temperatures, RoPE for linear attention and the conversion of layouts."""

import math

import pytest
import torch
from torch import nn

from posenc import KVCache, attention, masks
from posenc.encodings.queries_keys.pope import PoPE
from posenc.encodings.queries_keys.query_temperature import Llama4Temperature, LogN
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.queries_keys.rotate import convert_layout, layout_permutation
from posenc.encodings.queries_keys.xpos import XPos
from posenc.testing.harness import transform_queries_keys
from tests.golden_values import Case, cases


@pytest.mark.golden("xpos")
@pytest.mark.parametrize("case", cases("xpos"))
def test_xpos(case: Case):
    keys = len(case.inputs["kv_positions"])
    d, base, scale_base = (case.params[name] for name in ("head_dim", "base", "scale_base"))
    origin = (keys + 1) // 2  # where the authors put it for this many keys
    xpos = XPos(d, base, interleaved=True, scale_base=scale_base, origin=origin)
    q, k = (case.inputs[name][None] for name in "qk")
    positions = case.inputs["q_positions"], case.inputs["kv_positions"]
    got_q, got_k = transform_queries_keys(xpos, q, k, *positions)
    case.assert_close("q", got_q[0])
    case.assert_close("k", got_k[0])
    case.assert_close("logits", (got_q @ got_k.mT)[0])
    # The origin changes no score.
    fixed = XPos(d, base, interleaved=True, scale_base=scale_base)
    fixed_q, fixed_k = transform_queries_keys(fixed, q, k, *positions)
    case.assert_close("logits", (fixed_q @ fixed_k.mT)[0])


def test_xpos_scores_follow_the_papers_closed_form():
    torch.manual_seed(0)
    d, scale_base = 8, 4.0
    q, k = torch.randn(2, 1, 1, 6, d, dtype=torch.float64)
    positions = torch.arange(40, 46)
    xpos = XPos(d, interleaved=True, scale_base=scale_base)
    got_q, got_k = xpos(q, k, positions)
    for i in range(6):
        for j in range(6):
            score = 0.0
            for t in range(d // 2):
                fade = ((2 * t / d + 0.4) / 1.4) ** ((i - j) / scale_base)
                angle = (i - j) * 10000.0 ** (-2 * t / d)
                a, b = (complex(*x[0, 0, n, 2 * t : 2 * t + 2]) for x, n in ((q, i), (k, j)))
                transform_queries_keys = complex(math.cos(angle), math.sin(angle))
                score += fade * (a * transform_queries_keys * b.conjugate()).real
            assert float(got_q[0, 0, i] @ got_k[0, 0, j]) == pytest.approx(score, rel=1e-9)


def test_xpos_keeps_its_origin_while_the_cache_grows():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    positions = torch.arange(12)
    xpos = XPos(8, interleaved=False, scale_base=8.0)

    def attend(part: slice, **more):
        at = positions[part]
        return attention(
            q[:, :, part],
            k[:, :, part],
            v[:, :, part],
            xpos,
            q_positions=at,
            kv_positions=at,
            mask=masks.causal,
            **more,
        )

    cache = KVCache()
    steps = [attend(slice(i, i + 1), cache=cache) for i in range(12)]
    torch.testing.assert_close(torch.cat(steps, 2), attend(slice(0, 12)))


def test_xpos_refuses_positions_that_overflow():
    x = torch.ones(1, 1, 1, 8)
    xpos = XPos(8, interleaved=False)
    assert (
        xpos.claims.max_positions == xpos.reach(torch.float32) + 1 == xpos.reach(torch.float64) + 1
    )
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64):
        last = torch.tensor([xpos.reach(dtype)])
        _, k = xpos(x.to(dtype), x.to(dtype), last)
        assert k.isfinite().all()
        with pytest.raises(ValueError, match=f"{int(last) + 1} tokens from the origin 0"):
            xpos(x.to(dtype), x.to(dtype), last + 1)
    moved = XPos(8, interleaved=False, origin=10**6)
    moved(x, x, torch.tensor([10**6 + 5]))


@pytest.mark.golden("pope")
@pytest.mark.parametrize("case", cases("pope"))
def test_pope(case: Case):
    pope = PoPE(case.params["head_dim"], case.params["heads"], case.params["base"])
    with torch.no_grad():
        pope.weight.copy_(case.inputs["learned_bias"][:, 0])
    positions = case.inputs["q_positions"], case.inputs["kv_positions"]
    q, k = transform_queries_keys(pope, case.inputs["q"], case.inputs["k"], *positions)
    case.assert_close("q", q)
    case.assert_close("k", k)
    case.assert_close("logits", q @ k.mT)


def test_pope_clamps_its_phases_to_one_turn_back():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 5, 8)
    pope, positions = PoPE(8, 2), torch.arange(5)
    start = pope(q, k, positions)[1]
    for phase in (3.0, -9.0):  # clamped to 0 and to -2 pi, which is the same angle
        nn.init.constant_(pope.weight, phase)
        torch.testing.assert_close(pope(q, k, positions)[1], start)
    nn.init.constant_(pope.weight, -3.0)
    assert not torch.allclose(pope(q, k, positions)[1], start, atol=0.1)


def test_pope_scales_by_the_width_before_it_doubles():
    torch.manual_seed(0)
    q, v = torch.randn(2, 1, 4, 5, 8)
    k = torch.randn(1, 2, 5, 8)
    positions = torch.arange(5)
    pope = PoPE(8, 2)
    out = attention(q, k, v[:, :2], pope, q_positions=positions, kv_positions=positions)
    wide_q, wide_k = pope(q, k, positions)
    weights = (wide_q @ wide_k.repeat_interleave(2, 1).mT / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(out, weights @ v[:, :2].repeat_interleave(2, 1))
    with pytest.raises(ValueError, match=r"2 key/value heads of 8, got k with shape \(1, 4, 5, 8"):
        pope(q, q, positions)


def test_log_n_leaves_the_trained_length_alone():
    factor = LogN(512).factor(torch.tensor([0, 10, 510, 511, 512, 4095, 262143]))
    expected = [1, 1, 1, 1, math.log(513) / math.log(512), 12 / 9, 2]
    torch.testing.assert_close(factor, torch.tensor(expected), rtol=1e-7, atol=0)


def test_llama4_temperature_is_that_of_the_released_models():
    positions = torch.tensor([0, 8190, 8191, 131071, 1048575])
    factor = Llama4Temperature().factor(positions)
    # The values that the model cards print for 8k, 131k and 1M tokens.
    assert [round(float(f), 3) for f in factor] == [1, 1, 1.069, 1.283, 1.486]


def test_ministrals_temperature_is_that_of_transformers():
    ministral = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    positions = torch.tensor([[0, 16383, 16384, 40000, 262144]])
    public, early = "get_llama_4_attn_scale", "_get_llama_4_attn_scale"  # until 5.0
    theirs = getattr(ministral, public, None) or getattr(ministral, early)
    want = theirs(positions, 0.1, 16384).flatten()
    got = Llama4Temperature(16384, 0.1, offset=0).factor(positions[0])
    torch.testing.assert_close(got, want)


def test_a_temperature_scales_queries_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 4, 8, dtype=torch.bfloat16)
    positions = torch.tensor([[0, 1, 30, 40], [63, 64, 65, 66]])
    got_q, got_k = LogN(16)(q, k, positions)
    assert got_k is k and got_q.dtype == q.dtype
    factor = (positions + 1).log().div(math.log(16)).clamp(min=1)
    torch.testing.assert_close(got_q, (q.float() * factor[:, None, :, None]).bfloat16())


class Projections(nn.Module):
    """q and k of a layer with biases, norms over a head and grouped queries."""

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(embed_dim, num_heads * head_dim)
        self.k = nn.Linear(embed_dim, num_kv_heads * head_dim)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        for norm in (self.q_norm, self.k_norm):
            nn.init.normal_(norm.weight)

    def scores(self, x: torch.Tensor, rope: RoPE) -> torch.Tensor:
        q, k = (
            norm(f(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
            for f, norm in ((self.q, self.q_norm), (self.k, self.k_norm))
        )
        q, k = rope(q, k, torch.arange(x.shape[1]))
        return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize("to", ["half_split", "interleaved"])
def test_converted_weights_give_the_same_scores_in_the_other_layout(rotary_dim: int, to):
    torch.manual_seed(0)
    model = Projections(20, num_heads=4, num_kv_heads=2, head_dim=16)
    x = torch.randn(2, 7, 20)
    old = RoPE(16, interleaved=to == "half_split", rotary_dim=rotary_dim)
    new = RoPE(16, interleaved=to == "interleaved", rotary_dim=rotary_dim)
    with torch.no_grad():
        before = model.scores(x, old)
        assert not torch.allclose(before, model.scores(x, new), atol=1e-2)
        original = {name: p.clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.copy_(convert_layout(p, 16, to=to, rotary_dim=rotary_dim))
        torch.testing.assert_close(model.scores(x, new), before)
        back = "interleaved" if to == "half_split" else "half_split"
        for name, p in model.named_parameters():
            returned = convert_layout(p, 16, to=back, rotary_dim=rotary_dim)
            assert torch.equal(returned, original[name])


def test_the_permutation_to_halves_takes_even_channels_first():
    assert layout_permutation(8, to="half_split").tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert layout_permutation(8, 4, to="half_split").tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    assert layout_permutation(8, to="interleaved").tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_kernels_stored_with_outputs_last_convert_along_that_axis():
    weight = torch.randn(16, 10)
    want = convert_layout(weight, 8, to="half_split").T
    assert torch.equal(convert_layout(weight.T, 8, to="half_split", dim=-1), want)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: convert_layout(torch.zeros(12, 3), 8, to="half_split"), "heads of 8 .* got 12"),
        (lambda: layout_permutation(8, 3, to="half_split"), "head_dim=8, got 3"),
        (lambda: layout_permutation(8, to="gptj"), "got 'gptj'"),  # pyright: ignore
        (lambda: LogN(1), "train_length must be at least 2, got 1"),
        (lambda: Llama4Temperature(0), "floor_scale must be at least 1, got 0"),
        (lambda: XPos(7, interleaved=False), "head_dim must be even, got 7"),
        (lambda: XPos(8, interleaved=False, scale_base=0), "scale_base must be positive, got 0"),
    ],
)
def test_wrong_arguments_are_refused(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
