"""A bias by distance whose table all layers of one forward share."""

import pytest
import torch

import posenc
from posenc import masks
from tests.attending import attend

HEADS, LENGTH = 4, 300
POSITIONS = torch.arange(LENGTH)


class Counted(posenc.Kerple):
    """Count how often the bias was computed."""

    bias_tensors = ("r1", "r2")
    calls = 0

    def bias(self, distance):
        self.calls += 1
        return super().bias(distance)


def attended(encoding, q, length: int = LENGTH, dtype=torch.float32):
    x = q[:, :, :length].to(dtype)
    return attend(x, x, x, encoding, POSITIONS[:length])


@pytest.fixture
def q():
    torch.manual_seed(0)
    return torch.randn(2, HEADS, LENGTH, 16)


@torch.no_grad()
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "sandwich", "alibi+t5"])
def test_a_prepared_encoding_equals_the_unprepared_one(name, q):
    encoding = posenc.create(name, posenc.ModelShape(HEADS * 16, HEADS))
    ready = encoding.prepare(POSITIONS)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for length in (LENGTH, 40, LENGTH):
            want = attended(encoding, q, length, dtype)
            assert torch.equal(attended(ready, q, length, dtype), want)


@torch.no_grad()
def test_the_table_is_computed_once_for_all_layers(q):
    ready = Counted(HEADS).prepare(POSITIONS)
    for _ in range(3):
        attended(ready, q)
    last = {"q_positions": POSITIONS[-1:], "kv_positions": POSITIONS}
    posenc.attention(q[:, :, -1:], q, q, ready, mask=masks.causal, **last)
    assert ready.calls == 1  # the last query has the same distances
    for _ in range(3):
        attended(ready, q, 40)
    assert ready.calls == 2


class Warm(posenc.T5Bias):
    """A bias that also reads a number of its own."""

    warmth = 1.0

    def bias(self, distance):
        return self.warmth * super().bias(distance)


@torch.no_grad()
def test_a_subclass_that_reads_more_is_computed_each_time(q):
    encoding = Warm(HEADS)
    ready = encoding.prepare(POSITIONS)
    attended(ready, q)
    encoding.warmth = ready.warmth = 2.0
    assert torch.equal(attended(ready, q), attended(encoding, q))


def fused_step(module):
    torch.optim.AdamW(module.parameters(), lr=1.0, fused=True).step()


def foreach_step(module):
    torch.optim.SGD(module.parameters(), lr=1.0, foreach=True).step()


def through_data(module):
    for parameter in module.parameters():
        parameter.data.view(-1)[0] += 5


def from_a_vector(module):
    vector = torch.nn.utils.parameters_to_vector(module.parameters())
    torch.nn.utils.vector_to_parameters(vector + 1, module.parameters())


def through_numpy(module):
    for parameter in module.parameters():
        parameter.detach().numpy()[...] += 1


def rounded(module):
    module.to(torch.bfloat16).float()


WRITERS = (fused_step, foreach_step, through_data, from_a_vector, through_numpy, rounded)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "name", ["t5", "kerple", "alibi:learned=true", "deberta", "transformer_xl", "alibi+t5"]
)
def test_weights_written_in_any_way_are_followed(name, write, q):
    encoding = posenc.create(name, posenc.ModelShape(HEADS * 16, HEADS)).for_layer(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += torch.rand_like(parameter)
    ready = encoding.prepare(POSITIONS)
    with torch.no_grad():
        before = attended(ready, q, 60)
    for parameter in encoding.parameters():
        parameter.grad = torch.rand_like(parameter)
    write(encoding)
    with torch.no_grad():
        assert torch.equal(attended(ready, q, 60), attended(encoding, q, 60))
        assert not torch.equal(attended(ready, q, 60), before)


def test_a_gradient_reaches_the_weights_of_a_prepared_one(q):
    encoding = posenc.T5Bias(HEADS)
    ready = encoding.prepare(POSITIONS)
    with torch.no_grad():
        attended(ready, q)
    attended(ready, q).sum().backward()
    assert encoding.weight.grad is not None and encoding.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_another_number_of_heads_is_refused_for_one_query_too(q):
    with pytest.raises(ValueError, match="heads"):
        attend(q[:, :, -1:], q, q, posenc.T5Bias(HEADS + 1), POSITIONS, mask=None)


@torch.no_grad()
def test_a_block_of_one_query_does_not_write_its_mask_into_the_table(q):
    encoding, q = posenc.T5Bias(HEADS), q[:1]
    ready, shown = encoding.prepare(POSITIONS), POSITIONS % 3 != 1
    last = {"q_positions": POSITIONS[-1:], "kv_positions": POSITIONS, "return_lse": True}
    for mask in (masks.causal & masks.padding(shown[None]), masks.causal):
        out, _ = posenc.attention(q[:, :, -1:], q, q, encoding, mask=mask, prepared=ready, **last)
        want, _ = posenc.attention(q[:, :, -1:], q, q, encoding, mask=mask, **last)
        assert torch.equal(out, want)


def test_a_copy_prepared_from_other_parameters_is_refused(q):
    mine, other = posenc.Kerple(HEADS), posenc.Kerple(HEADS)
    for own in (mine, posenc.Compose(posenc.ALiBi(HEADS), mine)):
        attend(q, q, q, own, POSITIONS, prepared=own.prepare(POSITIONS))
    with pytest.raises(ValueError, match="with the same parameters"):
        attend(q, q, q, mine, POSITIONS, prepared=other.prepare(POSITIONS))
