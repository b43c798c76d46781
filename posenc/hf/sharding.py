"""Divide the layers of a model among the processes of torchrun, by torch's FSDP2.

    every layer: each process keeps 1/n of every weight, and gathers the layer while it runs
    the rest (embeddings, head, norm, adapters): the same in every process, gradients averaged

All processes run the same code on the same text, but for the rows of a step of tuning, which are
divided. Only the first one prints and writes.
"""

import atexit
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

LONGEST_WAIT = timedelta(days=1)
"""A process waits so long for the others: the first one writes and proves while they wait."""


def count() -> int:
    """Return the number of processes that torchrun started; 1 without it. Clusters set WORLD_SIZE
    for programs that torchrun did not start, too."""
    return int(os.environ["WORLD_SIZE"]) if distributed.is_torchelastic_launched() else 1


def rank() -> int:
    """Return the number of this process, from 0; 0 without torchrun."""
    return int(os.environ["RANK"]) if distributed.is_torchelastic_launched() else 0


def is_first() -> bool:
    """Return True in the process that prints and writes."""
    return rank() == 0


def start(device: str) -> str:
    """Let the processes of torchrun find each other, and return the kind of device of each: "cuda",
    where each gets a card of its own, or "cpu". device: that of --device."""
    uses_gpu = device in ("auto", "cuda") and torch.cuda.is_available()
    if uses_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if uses_gpu else "gloo", timeout=LONGEST_WAIT)
        # Threads of gloo that still run while Python ends can abort a process that succeeded. Not
        # with NCCL, where a process that fails would wait here for the others, for LONGEST_WAIT.
        if not uses_gpu:
            atexit.register(_leave_group)
    return "cuda" if uses_gpu else "cpu"


def _leave_group() -> None:
    """End the threads with which this process talks to the others, if it has not done so."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def shard_layers(model: Any, device: str) -> None:
    """Divide the weights of every layer of a model among the processes, in place, and move the rest
    to the device.

    The layers are those modules that transformers says must stay together. device: as `start`
    returns it. The model's weights are on the CPU, best as a map of their files, so that no device
    ever holds all of them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer_classes = set(model._no_split_modules or ())
    mesh = init_device_mesh(device, (count(),))
    for module in list(model.modules()):
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    model.to(device)
    # The first pass makes the tensors into which layers are gathered. Made in inference mode, they
    # could not be trained later.
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with torch.no_grad():
        model(tokens)


def kept_in_main_memory() -> AbstractContextManager[object]:
    """Return a context manager: what the backward pass needs of a forward pass inside it waits in
    main memory, and is copied to the card when it is needed. On the CPU nothing changes.

    For a model that recomputes its layers this is the input of each layer: for 80 layers, 32,768
    tokens and 8,192 channels in bfloat16 43 GB, which no card has room for beside its part.
    """
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def is_divided(tensor: Any) -> bool:
    """Return True for a tensor of torch's class DTensor, of which this process has a part."""
    return hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> bool:
    """Return True for a model of which this process has a part."""
    return any(is_divided(parameter) for parameter in model.parameters())


def rows_of_this_process(rows: Tensor) -> Tensor:
    """Return every n-th of the rows of a step, (rows / n, length), for n processes."""
    return rows[rank() :: count()]


def average(tensors: Iterable[Tensor]) -> None:
    """Average tensors over the processes, in place. Of a tensor that is divided among them, each
    has an averaged part already."""
    for tensor in tensors:
        if count() > 1 and not is_divided(tensor):
            distributed.all_reduce(tensor)
            tensor /= count()


def groups_for_optimizer(weights: Iterable[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Return the weights in groups of which an optimizer changes each at once: divided tensors and
    whole ones do not mix."""
    divided: list[nn.Parameter] = []
    whole: list[nn.Parameter] = []
    for weight in weights:
        (divided if is_divided(weight) else whole).append(weight)
    return [{"params": group} for group in (divided, whole) if group]


def clip_gradients(weights: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients of weights down to a norm of at most `max_norm` over all of them and over
    all processes, and return their norm before."""
    gradients: list[Any] = [weight.grad for weight in weights if weight.grad is not None]
    squares_of_whole = torch.zeros(())
    squares_of_parts = torch.zeros(())
    for gradient in gradients:
        if is_divided(gradient):
            squares_of_parts += gradient.to_local().float().square().sum().cpu()
        else:
            squares_of_whole += gradient.float().square().sum().cpu()
    squares = [torch.zeros(()) for _ in range(count())]
    distributed.all_gather_object(squares, squares_of_parts)
    norm = math.sqrt(float(squares_of_whole + sum(squares)))
    factor = max_norm / (norm + 1e-6)  # as torch's clip_grad_norm_
    if factor < 1:
        for gradient in gradients:
            gradient *= factor
    return norm


def sharded_like(whole: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor sharded over the processes as a weight is, in the weight's dtype; whole if
    the weight is.

    whole: the same in every process.
    """
    whole = whole.to(weight.dtype)
    if not is_divided(weight):
        return whole
    from torch.distributed.tensor import distribute_tensor

    divided: Any = weight  # a DTensor
    return distribute_tensor(whole, divided.device_mesh, divided.placements)


def gather_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole weights on the CPU in the first process, and {} in the others, of which each
    gives its parts. One weight at a time is whole on a device."""
    whole_by_name: dict[str, Tensor] = {}
    on_cpu: dict[int, Tensor] = {}  # by its memory, so that tied weights stay one
    for name, weight in state.items():
        if is_divided(weight):
            whole = weight.full_tensor().cpu()  # type: ignore[attr-defined]
        else:
            whole = on_cpu.setdefault(weight.data_ptr(), weight.detach().cpu())
        if is_first():
            whole_by_name[name] = whole
    return whole_by_name
