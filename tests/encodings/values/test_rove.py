"""Values that are rotated like keys: a value reaches a query by its distance."""

from typing import Any

import pytest
import torch

import posenc
from posenc import masks
from posenc.testing import CHECKS
from tests.attending import attend
from tests.golden_values import Case, cases


@pytest.mark.golden("rove")
@pytest.mark.parametrize("case", cases("rove_deepseek_v4"))
def test_shared_keys_and_values_are_those_of_deepseek_v4(case: Case):
    head_dim, rotary_dim, window = (case.params[n] for n in ("head_dim", "rotary_dim", "window"))
    if rotary_dim == head_dim:
        rotation = posenc.RoPE(head_dim, interleaved=True)
    else:
        rotation = posenc.DecoupledRoPE(head_dim, interleaved=True, rotary_dim=rotary_dim)
    mask = masks.causal & masks.sliding_window(window) if window else masks.causal
    q, kv = case.inputs["q"][None], case.inputs["kv"][None]
    positions, sinks = case.inputs["positions"], case.inputs["sinks"]
    out = attend(q, kv, kv, posenc.RoVE(rotation), positions, mask, sinks=sinks)
    case.assert_close("out", out[0])


ROTATIONS: dict[str, Any] = {
    "halves": posenc.RoPE(8, interleaved=False),
    "some channels": posenc.RoPE(8, interleaved=True, rotary_dim=4),
    "rotates_last_channels": posenc.DecoupledRoPE(8, interleaved=False, rotary_dim=6),
    "yarn": posenc.create("yarn", posenc.ModelShape(32, 4, train_length=16)),
    "longrope": posenc.create("longrope", posenc.ModelShape(32, 4, train_length=16)),
    "exempt": posenc.RoPE(
        8,
        interleaved=False,
        scaling=posenc.LongRoPE(
            4.0, 16, (1.0,) * 4, (2.0,) * 4, attention_factor=1.3, exempt_tokens=3
        ),
    ),
}


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("name", ROTATIONS)
def test_the_papers_formula(name, scores):
    """Each value alone, rotated by the difference of two positions."""
    torch.manual_seed(0)
    rotation, n = ROTATIONS[name], 7
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h in (4, 2, 2))
    positions = torch.tensor([0, 1, 2, 5, 6, 30, 31])
    out = attend(q, k, v, posenc.RoVE(rotation, rotate_queries_keys=scores), positions)
    new_q, new_k = rotation(q, k, positions) if scores else (q, k)
    raw = new_q @ new_k.repeat_interleave(2, 1).mT * 8**-0.5
    weights = raw.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
    eye = torch.eye(8, dtype=torch.float64).expand(1, 1, 8, 8)
    size = torch.hypot(*rotation.cos_sin(positions, torch.float64))[:, :1]

    def matrix(p: int) -> torch.Tensor:
        """R_p: the rotation of each unit vector, without the scaling's factor."""
        at = positions[p].expand(8)
        turned = rotation(eye, eye, at)[0][0, 0].mT
        still = (turned == torch.eye(8)).all(0)  # channels that do not rotate have no factor
        return turned / torch.where(still, 1.0, size[p])

    whole = [matrix(p) for p in range(n)]
    values = v.repeat_interleave(2, 1)
    for i in range(n):
        sent = [values[:, :, j] @ (whole[i].mT @ whole[j]).mT for j in range(n)]
        want = torch.einsum("bhj,jbhd->bhd", weights[:, :, i], torch.stack(sent))
        torch.testing.assert_close(out[:, :, i], want)


def test_a_position_map_leaves_values_at_their_true_positions():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    rope = posenc.RoPE(8, interleaved=False)
    mapped = posenc.ReRoPE(8, interleaved=False, window=4)
    both = posenc.Compose(mapped, posenc.RoVE(rope, rotate_queries_keys=False))
    positions = torch.arange(12)
    turned = rope(v, v, positions)[0]
    want = rope(attend(q, k, turned, mapped), q, -positions)[0]
    torch.testing.assert_close(attend(q, k, v, both), want)


@pytest.mark.parametrize(
    "wrong",
    [
        posenc.XPos(8, interleaved=True),
        posenc.ReRoPE(8, interleaved=False, window=4),
        posenc.ALiBi(2),
        None,
    ],
)
def test_what_is_no_plain_rotation_is_refused(wrong):
    with pytest.raises(TypeError, match="rotation must be RoPE, DecoupledRoPE, MRoPE or AxialRoPE"):
        posenc.RoVE(wrong)


def test_values_of_another_width_are_refused():
    q, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 6)
    with pytest.raises(ValueError, match=r"the rotation's head_dim=8, got \(1, 2, 4, 6\)"):
        attend(q, q, v, posenc.RoVE(posenc.RoPE(8, interleaved=False)))
    with pytest.raises(ValueError, match="Shaw and RoVE each decide"):
        posenc.Compose(posenc.Shaw(8), posenc.RoVE(posenc.RoPE(8, interleaved=False)))


@pytest.mark.parametrize("mscale", [0.0, 1.0])
def test_values_alone_leave_the_scale_of_the_scores(mscale):
    """The temperature of a YaRN belongs to the queries and keys that it rotates."""

    def make(shape):
        scaling = posenc.YaRN(4.0, 64, mscale_all_dim=mscale)
        rope = posenc.RoPE(shape.head_dim, interleaved=False, scaling=scaling)
        return posenc.RoVE(rope, rotate_queries_keys=False)

    CHECKS["own_scale_as_claimed"](make)
    encoding = make(posenc.ModelShape(64, 4))
    assert not encoding.claims.own_scale and encoding.scale(16) == 0.25
