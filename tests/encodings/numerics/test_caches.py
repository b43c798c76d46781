"""A cached result is returned until a tensor that it was made from changes."""

import pytest
import torch

import posenc
from posenc.encodings.numerics.caches import MAX_TABLES, TableCache


class Counted:
    """Return three times a weight, and count how often that was computed."""

    def __init__(self):
        self.kept, self.weight, self.count = TableCache(), torch.randn(3, 5), 0

    def __call__(self, key="x", *more):
        return self.kept(key, self.compute, self.weight, *more)

    def compute(self):
        self.count += 1
        return 3 * self.weight


@pytest.fixture
def counted():
    with torch.no_grad():
        yield Counted()


def test_the_same_weights_are_computed_once_for_each_key(counted):
    first = counted()
    assert counted() is first and counted("y") is not first
    assert counted() is first and counted.count == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.neg_(),
        lambda w: w.view(-1)[-1:].add_(1e-6),
        lambda w: w.data.add_(1),
        lambda w: w.detach().numpy().__setitem__((0, 0), 7.0),
    ],
)
def test_a_change_in_place_is_seen(counted, change):
    counted()
    change(counted.weight)
    assert torch.equal(counted(), 3 * counted.weight)
    assert counted.count == 2
    counted()
    assert counted.count == 2


def test_another_tensor_in_its_place_is_seen(counted):
    counted()
    counted.weight = torch.randn(3, 5)
    assert torch.equal(counted(), 3 * counted.weight) and counted.count == 2


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_of_an_optimizer_is_seen(counted, optimizer):
    counted.weight = torch.nn.Parameter(counted.weight)
    before = counted().clone()
    counted.weight.grad = torch.ones(3, 5)
    optimizer([counted.weight], lr=0.5).step()
    assert torch.equal(counted(), 3 * counted.weight) and not torch.equal(counted(), before)


def test_a_weight_that_is_no_number_is_computed_each_time(counted):
    counted.weight[0, 0] = float("nan")
    counted()
    counted.weight[0, 0] = 2.0
    assert torch.equal(counted(), 3 * counted.weight)


def test_every_input_of_a_kept_result_counts(counted):
    one = torch.arange(3)
    counted("x", one, None)
    counted("x", one)
    assert counted.count == 1
    one += 1
    counted("x", one)
    counted("x")
    assert counted.count == 3


def test_no_more_are_kept_than_the_latest(counted):
    for key in range(MAX_TABLES):
        counted(key)
    counted(1)
    assert counted.count == MAX_TABLES
    counted("another")
    counted(0)  # the oldest had gone
    assert counted.count == MAX_TABLES + 2 and len(counted.kept._entries) == MAX_TABLES


def test_where_a_gradient_is_followed_it_is_computed_each_time(counted):
    counted.weight = torch.nn.Parameter(counted.weight)
    with torch.enable_grad():
        assert counted().requires_grad and counted().requires_grad
    assert counted.count == 2
    assert not counted().requires_grad and counted.count == 3


def test_inference_mode_has_results_of_its_own(counted):
    with torch.inference_mode():
        assert counted().is_inference()
    assert not counted().is_inference()


@pytest.mark.parametrize("name", ["transformer_xl", "deberta", "t5", "kerple"])
def test_a_prepared_encoding_gives_what_the_encoding_gives(name):
    torch.manual_seed(0)
    encoding = posenc.create(name, posenc.ModelShape(64, 4, train_length=16))
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    q = k = v = torch.randn(2, 4, 40, 16)

    def attended(prepared=None, q_len=40):
        return posenc.attention(
            q[:, :, -q_len:],
            k,
            v,
            encoding,
            q_positions=range(40 - q_len, 40),
            kv_positions=range(40),
            mask=posenc.masks.causal,
            prepared=prepared,
        )

    prepared = encoding.prepare(range(40))
    assert encoding._table_cache is None
    with torch.no_grad():
        for q_len in (40, 1, 20, 40):
            first = attended(prepared, q_len)
            assert prepared._table_cache._entries
            assert torch.equal(first, attended(q_len=q_len))
    optimizer = torch.optim.SGD(encoding.parameters(), lr=0.1)
    attended(prepared).square().mean().backward()
    assert all(p.grad is not None for p in encoding.parameters())
    optimizer.step()
    with torch.no_grad():  # what was prepared before the step follows the weights
        assert torch.equal(attended(prepared), attended())
        assert not torch.equal(attended(prepared), first)


def test_what_was_prepared_for_another_encoding_is_refused():
    q = torch.randn(1, 4, 5, 16)
    where = {"q_positions": range(5), "kv_positions": range(5)}
    prepared = posenc.T5Bias(4).prepare(range(5))
    with pytest.raises(ValueError, match="of the same encoding"):
        posenc.attention(q, q, q, posenc.ALiBi(4), prepared=prepared, **where)
    with pytest.raises(TypeError, match="prepared"):
        posenc.attention(q, q, q, prepared="t5", **where)
