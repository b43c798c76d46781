"""Joined projections: what the layers give by themselves, rounded as autocast rounds."""

import contextlib
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from posenc.attend.projection import joins, project


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


def layers(*sizes: int, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(24, size, bias=bias) for size in sizes]


def gradients(function, x: torch.Tensor, modules, cast: bool = True) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with autocast() if cast else contextlib.nullcontext():
        outs = function(x, *modules)
    outs = outs if isinstance(outs, tuple) else (outs,)
    weights = torch.Generator().manual_seed(1)
    loss = sum((out.float() * torch.randn(out.shape, generator=weights)).sum() for out in outs)
    wanted = [x, *(p for m in modules for p in m.parameters())]
    return [*(out.float() for out in outs), *torch.autograd.grad(loss, wanted)]


def each(x, *modules):
    return tuple(module(x) for module in modules)


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() < 1e-2 * b.norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(16,), (16, 8, 8)])
@pytest.mark.parametrize("shape", [(5, 24), (2, 7, 24), (2, 3, 4, 24)])
def test_one_product_gives_what_the_layers_give(bias, sizes, shape):
    modules = layers(*sizes, bias=bias)
    x = torch.randn(shape)
    with autocast():
        assert joins(x, *modules)
    assert_close(gradients(project, x, modules), gradients(each, x, modules, cast=False))


def test_a_layer_that_learns_nothing_gets_no_gradient_and_the_others_do():
    first, second = layers(16, 8, bias=False)
    first.weight.requires_grad_(False)
    x = torch.randn(3, 24)
    with autocast():
        a, b = project(x, first, second)
    (a.float().sum() + b.float().sum()).backward()
    assert first.weight.grad is None
    assert second.weight.grad is not None
    torch.testing.assert_close(second.weight.grad, x.sum(0).expand(8, -1), rtol=1e-2, atol=1e-2)


class Adapted(nn.Linear):
    """An adapter that changes what the layer gives."""

    def forward(self, x):
        return super().forward(x) + 1


def test_a_layer_that_somebody_watches_or_changed_is_called_as_it_is():
    x, (plain, other) = torch.randn(3, 24), layers(16, 8, bias=False)
    seen = []
    hooked, adapted = deepcopy(plain), Adapted(24, 16, bias=False)
    hooked.register_forward_hook(lambda *args: seen.append(args))
    parametrised = deepcopy(plain)
    nn.utils.parametrizations.weight_norm(parametrised)
    exchanged = deepcopy(plain)
    exchanged.forward = hooked.forward  # as accelerate does
    with autocast():
        for layer in (hooked, adapted, parametrised, exchanged, deepcopy(plain).double()):
            assert not joins(x, other, layer)
        project(x, other, hooked)
        out = project(x, adapted)[0]
        with nn.modules.module.register_module_forward_hook(lambda *_: None):
            assert not joins(x, plain, other)
        assert joins(x, plain, other)
    assert len(seen) == 1
    torch.testing.assert_close(out.float(), F.linear(x, adapted.weight) + 1, rtol=2e-2, atol=2e-2)


def test_elsewhere_the_layers_run_by_themselves():
    x, modules = torch.randn(3, 24), layers(16, 8, bias=False)
    assert not joins(x, *modules), "no autocast"
    assert all(map(torch.equal, project(x, *modules), each(x, *modules)))
    with autocast(torch.float16):
        assert not joins(x, *modules)
    with autocast():
        assert not joins(x.double(), *modules)
        assert not joins(x, modules[0], nn.Linear(24, 8)), "one with a bias, one without"


def test_testing_takes_the_way_of_training():
    x, modules = torch.randn(3, 24), layers(16, 8, bias=False)
    with autocast():
        trained = [t.detach() for t in project(x, *modules)]
        with torch.no_grad():
            assert joins(x, *modules)
            assert all(map(torch.equal, project(x, *modules), trained))
