"""A range says that positions are consecutive, on every device, without reading them."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import posenc
from posenc import Decoder, DecoderConfig, masks
from posenc.encodings.base.term import Tokens
from posenc.models.stack import default_positions
from posenc.positions.tokens import (
    are_known_equal,
    as_range,
    as_tensor,
    concatenate_positions,
    consecutive_positions,
)

META, CPU = torch.device("meta"), torch.device("cpu")


def test_a_range_is_known_where_nothing_can_be_read():
    made = Tokens(torch.zeros(1, 1, 5, 2, device="meta"), range(7, 12))
    assert made.positions_or_range == range(7, 12) and made[2:4].positions_or_range == range(9, 11)
    assert made.positions.device.type == "meta" and len(made) == 5
    assert as_range(torch.arange(7, 12, device="meta")) is None


def test_tensors_on_the_cpu_are_read():
    assert as_range(torch.arange(3, 8)) == range(3, 8)
    assert as_range(torch.arange(3, 8).expand(2, -1)) == range(3, 8)
    for other in (torch.tensor([3, 4, 6]), torch.tensor([0.0, 1.0]), torch.arange(0)):
        assert as_range(other) is None
    assert as_range(torch.arange(3, 8, dtype=torch.int16)) == range(3, 8)
    for narrow in (torch.arange(300).to(torch.int8), torch.arange(70_000).to(torch.int16)):
        assert as_range(narrow) is None  # it begins again
    assert as_range(torch.tensor([False, True])) == range(2)
    assert as_range(range(0, 8, 2)) is None and as_range(range(0)) is None


def test_positions_that_were_written_into_are_read_again():
    values = torch.arange(5)
    assert Tokens(None, values).positions_or_range == range(5)
    values[0] = 3
    assert isinstance(Tokens(None, values).positions_or_range, torch.Tensor)


def test_a_models_own_positions_are_known():
    model = Decoder(DecoderConfig(17, 16, 1, 2))
    tokens = torch.zeros(1, 6, dtype=torch.int64, device="meta")
    assert default_positions(tokens, 3, model.encoding) == range(3, 9)


def test_ranges_that_follow_each_other_are_joined():
    assert concatenate_positions(range(3), range(3, 5), -1, 1, CPU) == range(5)
    assert torch.equal(
        concatenate_positions(range(3), range(7, 9), -1, 1, CPU), torch.tensor([0, 1, 2, 7, 8])
    )
    joined = concatenate_positions(torch.zeros(2, 2, dtype=torch.int64), range(2, 4), -1, 2, CPU)
    assert torch.equal(joined, torch.tensor([[0, 0, 2, 3]] * 2))


def test_equal_positions_are_equal_in_any_form():
    assert are_known_equal(range(3), range(3)) and not are_known_equal(range(3), range(1, 4))
    assert are_known_equal(range(3), torch.arange(3)) and not are_known_equal(
        torch.arange(1, 4), range(3)
    )
    assert not are_known_equal(torch.arange(3, device="meta"), torch.arange(3, device="meta"))


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "fire", "shaw", "xpos", "pope"])
def test_a_range_gives_what_the_tensor_gives(name):
    torch.manual_seed(0)
    encoding = posenc.create(name, posenc.ModelShape(64, 4, train_length=32)).for_layer(0)
    q, k, v = torch.randn(3, 2, 4, 40, 16)
    for count in (40, 7, 1):
        where = {"q_positions": range(45 - count, 45), "kv_positions": range(5, 45)}
        read = {name: as_tensor(positions) for name, positions in where.items()}
        got, want = (
            posenc.attention(q[:, :, -count:], k, v, encoding, mask=masks.causal, **positions)
            for positions in (where, read)
        )
        assert torch.equal(got, want)


def test_a_range_of_another_length_is_refused():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"must have shape \(5,\).*got \(6,\)"):
        posenc.attention(q, q, q, None, q_positions=range(6), kv_positions=range(5))


def test_a_range_with_steps_is_taken_as_its_numbers():
    q, encoding = torch.randn(1, 2, 5, 8), posenc.ALiBi(2)
    got, want = (
        posenc.attention(q, q, q, encoding, q_positions=p, kv_positions=p)
        for p in (range(0, 10, 2), torch.arange(0, 10, 2))
    )
    assert torch.equal(got, want)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name",
    ["rope", "alibi", *(pytest.param(n, marks=pytest.mark.slow) for n in ("nope", "t5", "shaw"))],
)
def test_a_range_breaks_no_graph_and_compiles_once_for_all_lengths(name):
    encoding = posenc.create(name, posenc.ModelShape(64, 4, train_length=32)).for_layer(0)

    def call(q, positions):
        where = {"q_positions": positions, "kv_positions": positions}
        return posenc.attention(q, q, q, encoding, mask=masks.causal, **where)

    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for length in (9, 11, 15, 21, 30):
        q = torch.randn(1, 4, length, 16)
        torch.testing.assert_close(compiled(q, range(length)), call(q, range(length)))
    assert counter.frame_count <= 2  # one for the first length, one for all others
    torch.compiler.reset()


@pytest.mark.slow
def test_a_models_positions_compile_once_for_all_lengths():
    model = Decoder(DecoderConfig(17, 16, 1, 2), posenc.RoPE(8, interleaved=False)).eval()
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for length in (9, 11, 15, 21):
            compiled(torch.zeros(1, length, dtype=torch.int64))
    assert counter.frame_count <= 2
    torch.compiler.reset()


def test_counted_positions_are_a_range():
    assert consecutive_positions(3, 4) == range(3, 7)
    assert as_tensor(consecutive_positions(3, 4), META).device.type == "meta"


@pytest.mark.parametrize("name", ["rope", "t5", "alibi", "cope"])
def test_positions_on_the_cpu_are_moved_to_the_device_of_the_tokens(name):
    """A device without values refuses tensors of two devices, as CUDA does."""
    q = torch.zeros(1, 2, 5, 8, device=META)
    with META:
        encoding = posenc.create(name, posenc.ModelShape(16, 2))
    at = {"q_positions": torch.arange(5), "kv_positions": torch.arange(5)[None]}
    assert posenc.attention(q, q, q, encoding, **at).device == META


def test_q_and_k_on_two_devices_are_refused_in_a_line():
    q, k = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8, device=META)
    with pytest.raises(TypeError, match=r"one dtype and one device, got .* on cpu and .* on meta"):
        posenc.attention(q, k, k, q_positions=range(5), kv_positions=range(5))
