"""T5's bias and buckets against three released implementations."""

import pytest
import torch

from posenc import ModelShape, T5Bias, create
from tests.golden_values import Case, cases


def build(case: Case, num_heads: int) -> T5Bias:
    names = ("bidirectional", "num_buckets", "max_distance")
    return T5Bias(num_heads, **{name: case.params[name] for name in names})


@pytest.mark.golden("t5")
@pytest.mark.parametrize("case", cases("t5_bias"))
def test_bias_equals_transformers(case: Case):
    encoding = build(case, case.params["heads"])
    encoding.load_state_dict({"weight": case.inputs["table"]})
    case.assert_close("bias", encoding(case.inputs["q_positions"], case.inputs["kv_positions"]))


@pytest.mark.parametrize("case", [*cases("t5_bucket"), *cases("t5_bucket_mesh")])
def test_buckets_equal_the_authors(case: Case):
    """Where t5x and transformers differ, on a boundary of float32, either is right."""
    bucket = build(case, 1).bucket(-case.inputs["relative_position"])
    right = [
        case.expected[name] == bucket for name in ("bucket", "bucket_hf") if name in case.expected
    ]
    assert torch.stack(right).any(0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64])
def test_buckets_of_real_distances_are_those_of_the_whole_part(dtype):
    encoding = T5Bias(2, bidirectional=True)
    distance = torch.arange(-300, 300)
    assert torch.equal(encoding.bucket(distance.to(dtype)), encoding.bucket(distance))
    if dtype.is_floating_point:
        past = distance[distance >= 0].to(dtype) + 0.5
        assert torch.equal(encoding.bucket(past), encoding.bucket(past.long()))


def test_bias_is_constant_from_the_last_edge_on():
    """113 with the defaults, 91 on either side of a bidirectional table (methods of section 5)."""
    for encoding, edge in ((T5Bias(4), 113), (T5Bias(4, bidirectional=True), 91)):
        bias = encoding.bias(torch.arange(edge - 1, 5000))
        assert (bias[:, 1:] == bias[:, 1:2]).all() and (bias[:, 0] != bias[:, 1]).any()


def test_shape_decides_the_direction():
    shape = ModelShape(embed_dim=8, num_heads=2, causal=False)
    encoder, decoder = create("t5", shape), T5Bias(2)
    assert encoder.bidirectional and not encoder.claims.causal_only
    assert not decoder.bidirectional and decoder.claims.causal_only
    assert (decoder.bucket(torch.arange(-50, 0)) == 0).all(), "the future is one bucket"


def test_buckets_that_cannot_be_laid_out_are_refused():
    with pytest.raises(ValueError, match="got num_buckets=7"):
        T5Bias(2, bidirectional=True, num_buckets=7)
    with pytest.raises(ValueError, match="max_distance=16"):
        T5Bias(2, max_distance=16)
