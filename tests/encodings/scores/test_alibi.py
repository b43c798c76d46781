"""ALiBi against the authors' slopes and biases, and its forms."""

import pytest
import torch

from posenc import ALiBi, attention
from posenc.testing.harness import as_tokens
from tests.attending import attend
from tests.golden_values import Case, cases
from tests.references import alibi_left_right

POSITIONS = torch.arange(9)


@pytest.mark.golden("alibi")
@pytest.mark.parametrize("case", cases("alibi"))
def test_bias_equals_the_authors(case: Case):
    bias = ALiBi(case.params["heads"])(case.inputs["q_positions"], case.inputs["kv_positions"])
    case.assert_close("bias", bias, where=case.expected["causal_valid"])


@pytest.mark.parametrize("case", cases("alibi"))
def test_key_only_forms_differ_by_a_constant_per_row(case: Case):
    """The authors' and BLOOM's slope * key position gives the same attention."""
    q, kv = case.inputs["q_positions"], case.inputs["kv_positions"]
    bias = ALiBi(case.params["heads"])(q.double(), kv.double())
    visible = case.expected["causal_valid"]
    assert visible.any(-1).all()
    want = bias.masked_fill(~visible, -torch.inf).softmax(-1)
    for name in ("bias_key_only", "bias_bloom"):
        if name in case.expected:
            key_only = case.expected[name].double()[:, None, :].expand_as(bias)
            got = key_only.masked_fill(~visible, -torch.inf).softmax(-1)
            # 1e-4: the oracle is float32, and its entries reach 1000 where positions do
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", cases("alibi_slopes"))
def test_slopes_equal_the_authors(case: Case):
    slopes = torch.tensor(ALiBi(case.params["heads"]).slopes, dtype=torch.float64)
    for name in ("slopes", "slopes_bloom", "slopes_neox"):
        case.assert_close(name, slopes)


@pytest.mark.parametrize("case", cases("alibi_symmetric"))
def test_symmetric_form(case: Case):
    bias = ALiBi(case.params["heads"])(case.inputs["q_positions"], case.inputs["kv_positions"])
    case.assert_close("bias", bias)


@pytest.mark.parametrize("num_heads", [2, 4, 8])
def test_left_right_form(num_heads: int):
    kv = torch.tensor([0, 3, 4, 11, 12])
    got = ALiBi(num_heads, form="left_right")(POSITIONS.double(), kv.double())
    want = alibi_left_right.bias(num_heads, POSITIONS.tolist(), kv.tolist())
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_left_right_tells_left_from_right_where_symmetric_cannot():
    """Reversing the sequence reverses what symmetric ALiBi gives, as if order had no direction."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 9, 8, dtype=torch.float64)
    places = {"q_positions": POSITIONS, "kv_positions": POSITIONS}
    for form, blind in (("symmetric", True), ("left_right", False)):
        encoding = ALiBi(4, form=form)
        out = attention(q, k, v, encoding, **places)
        reverse = attention(q.flip(2), k.flip(2), v.flip(2), encoding, **places)
        assert torch.allclose(reverse.flip(2), out) == blind, form


@pytest.mark.parametrize("form", ["symmetric", "left_right"])
def test_learned_slopes_start_at_the_papers_and_learn(form):
    fixed, learned = ALiBi(6, form=form), ALiBi(6, form=form, learned=True)
    bias = learned(POSITIONS, POSITIONS)
    torch.testing.assert_close(bias, fixed(POSITIONS, POSITIONS), rtol=1e-6, atol=0)
    bias.masked_fill(bias.isinf(), 0).sum().backward()
    grad = learned.log_slopes.grad
    assert grad.isfinite().all() and (grad != 0).all()
    assert fixed.num_parameters == 0 and learned.num_parameters == 6


@pytest.mark.parametrize("form", ["symmetric", "left_right"])
@pytest.mark.parametrize("learned", [False, True])
def test_ranks_of_tensor_parallel_hold_the_whole_models_slopes(form, learned):
    whole = ALiBi(12, form=form, learned=learned)(POSITIONS, POSITIONS)
    parts = [
        ALiBi(4, form=form, learned=learned, total_heads=12, head_offset=start)
        for start in (0, 4, 8)
    ]
    assert torch.equal(torch.cat([part(POSITIONS, POSITIONS) for part in parts]), whole)


def test_far_positions_lose_no_bits():
    """bfloat16 inputs, positions that float32 cannot hold: distances are taken first."""
    far = POSITIONS + 2**40
    assert torch.equal(ALiBi(8)(far, far), ALiBi(8)(POSITIONS, POSITIONS))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float64])
def test_bias_takes_any_shape_and_dtype(shape, dtype):
    distance = torch.randint(-9, 9, shape).to(dtype)
    bias = ALiBi(3).bias(distance)
    assert bias.shape == (3, *shape)
    assert bias.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_mpt_scales_its_slopes():
    """alibi_bias_max=4: the exponents are halved."""
    assert ALiBi(8, bias_max=4).slopes == tuple(s**0.5 for s in ALiBi(8).slopes)


def test_the_split_term_is_the_causal_bias():
    encoding = ALiBi(5, learned=True).double().requires_grad_(False)
    row, key = term_of(encoding).query_and_key_bias()
    got = (row[:, :, None] - key[:, None, :]).tril()
    torch.testing.assert_close(got, encoding(POSITIONS.double(), POSITIONS.double()).tril())
    assert term_of(ALiBi(4, form="left_right")).query_and_key_bias is None


def term_of(encoding: ALiBi):
    q = torch.zeros(1, len(encoding.slopes), len(POSITIONS), 4)
    return encoding.term(*as_tokens(q, None, POSITIONS, POSITIONS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "at least 1, got 0"),
        ({"num_heads": 5, "form": "left_right"}, "even number of heads, got 5"),
        ({"num_heads": 4, "head_offset": 2}, "heads 2 to 5 are not among total_heads=4"),
        ({"num_heads": 4, "form": "both"}, "'both'"),
    ],
)
def test_errors_name_the_number(arguments, message):
    with pytest.raises(ValueError, match=message):
        ALiBi(**arguments)


def test_other_head_count_is_refused():
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=r"built for 4 heads, got 2"):
        attend(q, q, q, ALiBi(4), POSITIONS, impl="reference")
