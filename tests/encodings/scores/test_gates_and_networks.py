"""What CoPE and FIRE add to the scores without gradients: the same as float64."""

import pytest
import torch

import posenc
from posenc import masks
from tests.attending import attend

LENGTH, HEADS, WIDTH = 200, 4, 16


def filled(name: str, spread: float = 0.5, **options) -> posenc.PositionEncoding:
    torch.manual_seed(0)
    shape = posenc.ModelShape(HEADS * WIDTH, HEADS, train_length=64)
    encoding = posenc.create(name, shape, **options).for_layer(0)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=spread)
    return encoding


def attended(encoding, impl, mask=masks.causal, dtype=torch.float32, q_positions=None):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, HEADS, LENGTH, WIDTH).to(dtype) for _ in range(3))
    positions = torch.arange(LENGTH) if q_positions is None else q_positions
    state = v if getattr(encoding, "gates", "key") == "value" else None
    with torch.no_grad():
        out = attend(q, k, v, encoding.to(dtype), positions, mask=mask, kv_state=state, impl=impl)
    assert isinstance(out, torch.Tensor)
    return out


PADDED = masks.causal & masks.padding(torch.arange(LENGTH) < torch.tensor([[150], [LENGTH]]))
BY_HEAD = masks.causal & masks.Mask(lambda pairs: pairs.kv_idx % HEADS != pairs.head)


@pytest.mark.parametrize(
    "mask", [masks.causal, PADDED, BY_HEAD, None], ids=["causal", "padded", "by-head", "none"]
)
@pytest.mark.parametrize("impl", ["reference", "blocks"])
@pytest.mark.parametrize(
    "name, options",
    [("cope", {}), ("cope", {"num_positions": 2}), ("cope", {"num_positions": 500}), ("fire", {})],
)
def test_it_is_what_plain_operations_give_in_float64(name, options, impl, mask):
    encoding = filled(name, **options)
    got = attended(encoding, impl, mask)
    want = attended(encoding, "reference", mask, torch.float64)
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=0)


def test_gates_may_be_other_than_the_scores():
    encoding = filled("cope", gates="value")
    got = attended(encoding, "blocks")
    want = attended(encoding, "reference", dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=0)


def test_each_of_a_batch_may_have_its_own_positions():
    encoding = filled("fire")
    positions = torch.stack([torch.arange(LENGTH), 3 * torch.arange(LENGTH) + 7])
    got = attended(encoding, "blocks", q_positions=positions)
    want = attended(encoding, "reference", dtype=torch.float64, q_positions=positions)
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=0)


def added(encoding, scores: torch.Tensor) -> torch.Tensor:
    rows, keys = scores.shape[-2:]
    torch.manual_seed(3)
    q = posenc.Tokens(torch.randn(2, HEADS, rows, WIDTH), torch.arange(rows) + keys - rows, None, 1)
    k = posenc.Tokens(torch.randn(2, HEADS, keys, WIDTH), torch.arange(keys), None, 1)
    with torch.no_grad():
        return encoding.term(q, k).add(scores, slice(0, rows), slice(0, keys), None)


def test_a_score_that_is_no_number_stays_one_and_stays_in_its_row():
    scores = torch.zeros(2, HEADS, 5, 70)
    scores[0, 1, 2, 40] = torch.nan
    got = added(filled("cope"), scores)
    assert got[0, 1, 2, 40].isnan()
    got[0, 1, 2] = 0
    assert got.isfinite().all()
