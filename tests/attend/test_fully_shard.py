"""FSDP2 shards a layer together with its encoding; an encoding as a unit of its own is refused."""

import pytest
import torch

import posenc
from posenc.encodings.registry import lookup
from tests.attend.test_shards import free_port, start_rank

SHARDED = """
import sys, torch, posenc
from posenc import masks
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
shape = posenc.ModelShape(16, 2, train_length=8, causal=True)
kinds = ["learned", *sys.argv[1:]]


class Layer(torch.nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.attention = posenc.Attention(16, 2, encoding=encoding)

    def forward(self, x, positions):
        return x + self.attention(x, positions, mask=masks.causal)


def layers(name):
    torch.manual_seed(0)
    found = [Layer(posenc.create(name, shape).for_layer(0)) for _ in range(2)]
    for p in [p for layer in found for p in layer.parameters()]:
        torch.nn.init.normal_(p, std=0.1)
    return torch.nn.Sequential(*found)


def run(model, x, positions):
    for layer in model:
        x = layer(x, positions)
    (x * x).mean().backward()
    return x


x, positions = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8)
for name in sys.argv[1:]:
    whole, parts = layers(name), layers(name)
    wanted = run(whole, x, positions)
    for layer in parts:
        fully_shard(layer, mesh=mesh)
    fully_shard(parts, mesh=mesh)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    got = run(parts, x[mine], positions)
    torch.testing.assert_close(got, wanted[mine], rtol=1e-5, atol=1e-6)
    for (path, p), (_, q) in zip(parts.named_parameters(), whole.named_parameters()):
        if q.grad is None:
            assert p.grad is None, path
        else:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-7)
    alone = layers(name)[0]
    inner = alone.attention.encoding
    if list(inner.parameters()):
        fully_shard(inner, mesh=mesh)
        try:
            alone(x, positions)
        except ValueError as error:
            assert "Shard the layer that contains it: fully_shard(layer)" in str(error), error
        else:
            raise AssertionError(f"{name} alone is not refused")
    print(name, "ok", flush=True)
"""
NAMES = ("fire", "t5", "shaw", "cope", "kerple", "dape", "fox", "rope", "transformer_xl")


@pytest.mark.slow
def test_an_encoding_is_sharded_with_its_layer_and_not_alone(tmp_path):
    path, port = tmp_path / "sharded.py", free_port()
    path.write_text(SHARDED, encoding="utf-8")
    ranks = [start_rank(rank, port, path, *NAMES) for rank in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=300)
        assert rank.returncode == 0, err
        assert [line.split()[0] for line in out.splitlines()] == list(NAMES)


def test_no_encoding_has_a_parameter_without_an_axis():
    shape = posenc.ModelShape(16, 2, train_length=8, causal=True)
    names = [name for name in lookup.names() if name != "axial"]
    found = []
    for name in names:
        try:
            encoding = posenc.create(name, shape)
        except ValueError:  # needs more arguments than a shape has
            continue
        found += [f"{name}.{path}" for path, p in encoding.named_parameters() if not p.ndim]
    assert found == [] and len(names) > 20


def test_a_state_of_fire_without_axes_is_read():
    fire = posenc.FIRE(num_heads=2)
    old = {name: p.clone() for name, p in fire.state_dict().items()}
    old |= {"c": torch.tensor(0.3), "multiplier": torch.tensor(0.7)}
    inside = torch.nn.Sequential(fire)
    inside.load_state_dict({f"0.{name}": p for name, p in old.items()})
    assert (fire.c.item(), fire.multiplier.item()) == pytest.approx((0.3, 0.7))
    fire.load_state_dict(fire.state_dict())
