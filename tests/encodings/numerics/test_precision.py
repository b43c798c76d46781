"""An adapter on an encoding's linear layer is never left out without a word."""

import pytest
import torch
from torch import nn

import posenc
from posenc.encodings.registry import lookup

SHAPE = posenc.ModelShape(embed_dim=32, num_heads=4, train_length=16)
LENGTH = 6
CELLS = posenc.positions.grid(2, 3)


class Adapted(nn.Linear):
    """Compute something else than the weight says, as LoRA does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(input) + 1


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 3 * weight


def layer_with(name: str) -> posenc.Attention:
    torch.manual_seed(0)
    layer = posenc.Attention(32, 4, encoding=posenc.create(name, SHAPE))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)  # tables that begin with zeros would feel no change
    return layer


def linears(name: str) -> list[str]:
    encoding = posenc.create(name, SHAPE)
    return [where for where, module in encoding.named_modules() if type(module) is nn.Linear]


CASES = [(name, where) for name in lookup.names() for where in linears(name)]
X = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def attended(layer: posenc.Attention) -> torch.Tensor:
    if layer.encoding.claims.num_axes == 2:
        return layer(X, positions=CELLS)
    return layer(X, positions=range(LENGTH), mask=posenc.masks.causal)


def test_encodings_with_linear_layers_are_tried():
    names = {"fox", "dape", "fire", "transformer_xl", "deberta", "inkling", "repo", "swin_v2"}
    assert {name for name, _ in CASES} >= names


@pytest.mark.parametrize(("name", "where"), CASES)
def test_an_adapter_on_a_linear_layer_is_refused(name, where):
    layer = layer_with(name)
    parent, _, attribute = where.rpartition(".")
    old = layer.encoding.get_submodule(where)
    adapted = Adapted(old.in_features, old.out_features, old.bias is not None)
    adapted.load_state_dict(old.state_dict())
    setattr(layer.encoding.get_submodule(parent), attribute, adapted)
    with pytest.raises(ValueError, match="Adapted stands where an encoding reads the weight"):
        attended(layer)


@pytest.mark.parametrize(("name", "where"), CASES)
def test_a_parametrized_weight_is_read_as_it_is_computed(name, where):
    layer, other = layer_with(name), layer_with(name)
    inner = layer.encoding.get_submodule(where)
    nn.utils.parametrize.register_parametrization(inner, "weight", Scaled())
    with torch.no_grad():
        other.encoding.get_submodule(where).weight.mul_(3)
    torch.testing.assert_close(attended(layer), attended(other))
