"""FlexAttention runs the encodings' own score_mod, or says why it cannot."""

import pytest
import torch

import posenc
from tests.attending import attend
from tests.compilers import needs_inductor

SHAPE = posenc.ModelShape(64, 4, 2, 16)


def call(encoding, impl, grad=False, dtype=torch.float32, length=150):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, length, 16, dtype=dtype, requires_grad=grad and h == 2) for h in (4, 2, 2)
    )
    return attend(q, k, v, encoding, impl=impl)


@pytest.mark.slow
@needs_inductor
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("name", ["alibi", "t5", "deberta"])
def test_flex_equals_the_reference(name):
    encoding = posenc.create(name, SHAPE).requires_grad_(False)
    for length in (150, 300):  # a second length is where torch would compile for any
        with torch.no_grad():
            # float32 sums in another order
            torch.testing.assert_close(
                call(encoding, "flex", length=length), call(encoding, "reference", length=length),
                rtol=1e-5, atol=1e-5,
            )  # fmt: skip
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("alibi", {"grad": True}, "no backward pass on the CPU"),
        ("alibi", {"dtype": torch.float64}, "float32, bfloat16 and float16"),
        ("cope", {}, "whole rows"),
        ("shaw", {}, "reads the attention weights"),
    ],
)
def test_flex_refuses_with_the_reason(name, options, why):
    encoding = posenc.create(name, SHAPE).requires_grad_(False)
    with pytest.raises(ValueError, match=why):
        call(encoding, "flex", **options)
