"""Claims about masks, and about attention without positions."""

import torch
from torch import Tensor

from experiments.claims.claim import IDENTITY, PARTLY, Group, Measured, amount
from posenc import masks
from posenc.attend.attention import attention
from posenc.attend.attention_layer import Attention
from posenc.masks import Mask

CLAIMS = Group()

_HAVIV = "Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466"


def _random(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


@torch.no_grad()
def _last_output(layers: int, x: Tensor, mask: Mask | None) -> Tensor:
    """Return the last token's state after residual attention layers without positions."""
    torch.manual_seed(0)
    positions = torch.arange(x.shape[1])
    for _ in range(layers):
        x = x + Attention(32, 4).double()(x, positions, mask=mask)
    return x[:, -1]


def _order_moves(layers: int, mask: Mask | None) -> float:
    x = _random(1, 12, 32)
    order = [*torch.randperm(11, generator=torch.Generator().manual_seed(1)).tolist(), 11]
    here, there = (_last_output(layers, tokens, mask) for tokens in (x, x[:, order]))
    return (here - there).abs().max().item()


@CLAIMS.add("Transformers need a position encoding to tell order")
def _need_positions() -> Measured:
    blind, seen = _order_moves(2, None), _order_moves(2, masks.causal)
    text = (
        f"two layers without positions: permuted tokens move the output by {amount(blind)} "
        f"without a mask, by {amount(seen)} under a causal one"
    )
    return text, PARTLY if blind < 1e-9 < seen else False


@CLAIMS.add("Causal attention without positions tells order apart, from two layers on", _HAVIV)
def _two_layers() -> Measured:
    one, two = (_order_moves(n, masks.causal) for n in (1, 2))
    text = (
        "permuting the tokens before the last moves its output by "
        f"{amount(one)} after one layer, {amount(two)} after two"
    )
    return text, one < 1e-9 and two > 1e-4


def weights_of(scores: Tensor, mask: Mask | None) -> Tensor:
    """Return the attention weights of q (1, 1, len, width) with itself, for unit values."""
    unit = torch.eye(scores.shape[2], dtype=scores.dtype)[None, None]
    return _attend(scores, scores, unit, mask)[0, 0]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Attend by the reference, without an encoding, at positions 0, 1, 2, ..."""
    at = torch.arange(q.shape[2])
    out = attention(q, k, v, q_positions=at, kv_positions=at, mask=mask, impl="reference")
    assert isinstance(out, Tensor)
    return out


@CLAIMS.add("A causal mask keeps attention of full rank")
def _full_rank() -> Measured:
    q = _random(1, 1, 64, 4)
    weights = weights_of(q, masks.causal)
    log_det = torch.linalg.slogdet(weights)
    product = weights.diagonal().log().sum()
    lowest = weights.diagonal().min().item()
    text = (
        f"64 tokens, heads of 4: log-determinant {log_det.logabsdet:.1f}, as the diagonal's "
        f"logarithms add up to, {product:.1f}; the smallest diagonal weight is {lowest:.1e}: the "
        "rank of a triangle with a positive diagonal is full, and it may be close to a singular one"
    )
    equal = bool((log_det.logabsdet - product).abs() < 1e-6)
    return text, IDENTITY if equal and lowest > 0 else False


@CLAIMS.add("Under a causal mask a token sees half the context on average")
def _half() -> Measured:
    index = torch.arange(512)
    seen = masks.causal(torch.tensor(0), torch.tensor(0), index[:, None], index).double()
    mean = seen.sum(-1).mean().item()
    return f"{mean:g} of 512 keys on average: (n + 1) / 2", mean == 256.5


def _gradient(rows_see_nothing: bool) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of the masked keys' values and keys."""
    q, k, v = (_random(1, 1, 6, 8, seed=s).requires_grad_() for s in range(3))
    valid = torch.zeros(1, 6) if rows_see_nothing else torch.tensor([[1, 1, 0, 0, 1, 1]])
    out = _attend(q, k, v, masks.padding(valid))
    grads = torch.autograd.grad(out.square().sum(), (k, v))
    hidden = valid[0] == 0
    return out, torch.cat([g[:, :, hidden].flatten() for g in grads])


@CLAIMS.add("Masked positions get no gradient")
def _zero_gradient() -> Measured:
    _, grad = _gradient(False)
    return f"largest gradient of hidden keys and values {grad.abs().max():g}", not grad.any()


_MINUS = -1e9


@CLAIMS.add("Adding -1e9 to masked scores is the same as minus infinity")
def _minus_a_billion() -> Measured:
    scores = _random(6)
    uniform = (scores.float() + _MINUS).softmax(-1)
    nan = torch.full((6,), -torch.inf).softmax(-1).isnan().all()
    out, _ = _gradient(True)
    text = (
        f"a row with all of 6 keys masked: -1e9 gives each {uniform[0]:.3f}, the mean of what is "
        f"forbidden; -inf gives {'nan' if nan else 'numbers'} in a plain softmax; here zeros "
        f"(largest output {out.abs().max():g})"
    )
    return text, bool((uniform.nan_to_num() < 1e-6).all())
