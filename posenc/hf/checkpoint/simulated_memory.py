"""Count the memory of a model on the meta device, where tensors have shapes and no values: the code
that will run is run, and nothing is computed."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATORS_OF_VALUES = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
)
"""Operators that return the value of a tensor of one element to Python."""

GROUPED_PRODUCT = getattr(torch.ops.aten, "_grouped_mm", None)
"""Operator of the products of experts; None in releases of torch without it."""


class SimulatedMemory(TorchDispatchMode):
    """Add up the bytes of all tensors that operators return inside the block, while they exist.

    model: its parameters and buffers are not counted; None for no model.

    live: bytes now. peak: most bytes so far. Views count once, with the tensor that they show.

    >>> with SimulatedMemory() as memory:
    ...     zeros = torch.zeros(1000, device="meta")  # 4 bytes each
    ...     row = (zeros + 1).view(10, 100)[0]
    ...     del zeros, row
    >>> memory.live, memory.peak
    (0, 8000)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        weights = [] if model is None else [*model.parameters(), *model.buffers()]
        self._known_storages = {weakref.ref(weight.untyped_storage()) for weight in weights}

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        options = dict(options or {})
        if options.get("device") is not None:  # nothing leaves the meta device, which has no values
            options["device"] = torch.device("meta")
        if operator in OPERATORS_OF_VALUES:
            return 1  # code that asks whether all rows are plain ones finds that they are
        if GROUPED_PRODUCT is not None and operator is GROUPED_PRODUCT.default:
            out = _grouped_product(operator, *arguments, **options)
        else:
            out = _without_values(operator, *arguments, **options)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._count(leaf)
        return out

    def _count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, unless it is counted already, until it is freed."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()

        def forget(reference: weakref.ref[Any]) -> None:
            self.live -= num_bytes
            self._known_storages.discard(reference)

        reference = weakref.ref(storage, forget)
        if reference in self._known_storages:
            return
        self._known_storages.add(reference)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _without_values(operator: Any, *arguments: Any, **options: Any) -> Any:
    """Return what an operator returns for tensors without values. Raises: ValueError for one that
    torch does not run on them, such as `nonzero`, whose result is as large as values say."""
    try:
        return operator(*arguments, **options)
    except NotImplementedError as error:
        raise ValueError(
            f"the model's code calls {operator}, which torch does not run on tensors without "
            "values, and a plan has no others, so its memory cannot be simulated. Plan with a "
            "newer transformers or torch, if there is one, or leave the plan out."
        ) from error


def _grouped_product(
    operator: Any, first: Tensor, second: Tensor, *others: Any, **options: Any
) -> Tensor:
    """Return what torch's grouped product of two tensors without values returns, in their dtype. On
    the meta device torch takes bfloat16 only, on others float32 as well."""
    out = operator(first.bfloat16(), second.bfloat16(), *others, **options)
    return out.to(first.dtype)


def bytes_of_weights(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; tied ones count once."""
    storages = {tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for storage in storages)


class _FusedAttention(torch.autograd.Function):
    """Return a tensor of the shape of attention's output, and keep what fused kernels keep for the
    backward pass: queries, keys, values, the output and a number per query. Scores are never held.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return an output of queries (batch, num_heads, rows, head_dim), laid out with the rows
        before the heads, as the kernels do."""
        batch, num_heads, rows, _ = query.shape
        out = query.new_empty(batch, rows, num_heads, value.shape[-1]).transpose(1, 2)
        log_sums = query.new_empty(batch, num_heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of the queries, keys and values."""
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextmanager
def meta_device_like_others() -> Iterator[None]:
    """Let models run on the meta device, inside the block, as they do on others.

    Torch's attention is a fused kernel: on the meta device torch would count the one that holds all
    scores. Autocast is off: older releases of transformers ask torch whether it is on, and torch
    raises for a device without it.
    """
    attention_before = F.scaled_dot_product_attention
    is_autocast_enabled_before = torch.is_autocast_enabled

    def fused_attention(
        query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
    ) -> Tensor:
        """Take the arguments of torch's attention."""
        return _FusedAttention.apply(query, key, value)  # type: ignore[return-value]

    def is_autocast_enabled(*device_types: str) -> bool:
        """Take the arguments of torch's function, and answer False for the meta device."""
        return device_types != ("meta",) and is_autocast_enabled_before(*device_types)

    F.scaled_dot_product_attention = fused_attention
    torch.is_autocast_enabled = is_autocast_enabled
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention_before
        torch.is_autocast_enabled = is_autocast_enabled_before
