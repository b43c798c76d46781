"""What is kept is given again while its weights hold the same bits, and never else."""

import copy
import pickle

import pytest
import torch

import posenc
from posenc.numbers.kept import Kept


class Counted:
    """Three times a weight, and how often that was computed."""

    def __init__(self):
        self.kept, self.weight, self.count = Kept(), torch.randn(3, 5), 0

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
        lambda w: w.data.neg_(),
        lambda w: w.data.copy_(w.flip(0)),
        lambda w: w.data.view(-1)[-1:].add_(1e-6),
        lambda w: w.data[0, 0].copy_(torch.tensor(float("nan"))),
        lambda w: setattr(w, "data", w.data.double()),
        lambda w: setattr(w, "data", w.data.view(5, 3)),
    ],
)
def test_any_change_is_seen_even_one_that_leaves_no_version(counted, change):
    counted()
    version = counted.weight._version
    change(counted.weight)
    assert counted.weight._version == version
    torch.testing.assert_close(counted(), 3 * counted.weight, equal_nan=True)
    assert counted.count == 2
    counted()
    assert counted.count == 2  # NaN too is the same bits


def test_what_else_it_was_computed_from_counts(counted):
    one = torch.arange(3)
    counted("x", one, None)
    counted("x", one.clone())
    assert counted.count == 1
    counted("x", one + 1)
    counted("x")
    assert counted.count == 3


def test_no_more_are_kept_than_asked_for(counted):
    counted.kept = Kept(most=2)
    for key in ("x", "y", "x", "y"):
        counted(key)
    assert counted.count == 2
    counted("z")
    counted("y")
    assert counted.count == 3
    counted("x")  # the oldest had gone
    assert counted.count == 4 and len(counted.kept._last) == 2


def test_where_something_watches_it_is_computed_each_time(counted):
    counted()
    with torch.enable_grad():
        counted()
    with torch.autocast("cpu", torch.bfloat16):
        counted()
    torch.func.vmap(lambda _: counted())(torch.zeros(2))
    assert counted.count == 4


def test_a_copy_begins_anew(counted):
    counted()
    for other in (copy.deepcopy(counted.kept), pickle.loads(pickle.dumps(counted.kept))):
        assert not other._last


@pytest.mark.parametrize("name", ["transformer_xl", "deberta"])
def test_an_encoding_gives_what_it_gives_without_it(name, monkeypatch):
    encoding = posenc.create(name, posenc.ModelShape(64, 4, train_length=16))
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    q = k = v = torch.randn(2, 4, 40, 16)

    def attended(q_len=40):
        p = torch.arange(40)
        return posenc.attention(
            q[:, :, -q_len:], k, v, encoding, q_positions=p[-q_len:], kv_positions=p,
            mask=posenc.masks.causal,
        )  # fmt: skip

    calls, plain = [], encoding._kept
    with torch.no_grad():
        first = [attended(n) for n in (40, 1, 20, 40)]
        assert plain._last
        again = [attended(n) for n in (40, 1, 20, 40)]
        encoding.projection.weight.data.mul_(2) if name == "transformer_xl" else (
            encoding.pos_query.bias.data.add_(1)
        )
        changed = attended()
        monkeypatch.setattr(
            encoding, "_kept", lambda key, compute, *given: calls.append(1) or compute()
        )
        fresh = attended()
    assert all(map(torch.equal, first, again)) and torch.equal(first[0], first[-1])
    assert calls and torch.equal(changed, fresh) and not torch.equal(changed, first[0])
    attended().sum().backward()
    assert all(p.grad is not None for p in encoding.parameters())
