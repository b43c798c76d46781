"""Low-rank adapters on the projections of attention (LoRA): add, switch off, merge, and write them
as peft reads them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from posenc.files.atomic import write_atomically
from posenc.files.opening import make_subfolder
from posenc.files.sealed_json import strict_json
from posenc.hf.sharding import sharded_like

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class LoRALinear(nn.Module):
    """Add a trainable low-rank map to a frozen linear layer.

    y = W x + (alpha / rank) B A x, plus the bias of the layer; x is (..., inputs). W is frozen, A,
    `down`, is random and B, `up`, is zero, so that training starts at W.

    base: nn.Linear, or GPT-2's Conv1D. rank: rows of A. alpha: see the formula.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1; LongLoRA, arXiv:2309.12307, for context
    extension.
    """

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.is_on = True
        # GPT-2's Conv1D keeps (in, out).
        rows, columns = self._weight.shape
        self.transposed = not isinstance(base, nn.Linear)
        in_features, out_features = (rows, columns) if self.transposed else (columns, rows)
        # Whole in every process, also where the weight is divided among several.
        options = {"dtype": torch.float32, "device": self._weight.device}
        self.down = nn.Parameter(torch.empty(rank, in_features, **options))
        self.up = nn.Parameter(torch.zeros(out_features, rank, **options))
        # As the LoRA authors' code and nn.Linear do it.
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    @property
    def _weight(self) -> Tensor:
        """Return the frozen weight of the base layer."""
        assert isinstance(self.base.weight, Tensor)
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the base layer plus that of the adapters, in the dtype of `x`."""
        if not self.is_on:
            return self.base(x)
        # The small matrices are rounded to the dtype of x, instead of widening the many values of
        # x, which the backward pass would keep.
        added = (x @ self.down.to(x.dtype).T @ self.up.to(x.dtype).T) * self.scale
        return self.base(x) + added

    @torch.no_grad()
    def merge_into_base(self) -> nn.Module:
        """Add the adapters to the weights of the layer, in place, and return the layer."""
        weight_change = self.up @ self.down * self.scale
        weight_change = weight_change.T if self.transposed else weight_change
        self._weight.add_(sharded_like(weight_change, self._weight))
        return self.base


def add_lora(
    model: nn.Module, rank: int = 8, alpha: float = 16.0, *, only_adapters: bool = False
) -> int:
    """Replace the model's attention projections by LoRALinear, in place, and freeze all other
    parameters but, unless `only_adapters`, those of embeddings and norms, as LongLoRA does.

    Returns: the number of trainable parameters, each of their elements counted.
    Raises: ValueError if no projection is found; the model is then unchanged.
    """
    paths_and_layers = list(projections(model))
    if not paths_and_layers:
        raise ValueError("LoRA: found no projections of attention; tune the full model instead.")
    for name, parameter in model.named_parameters():
        stays_trainable = "embed" in name or "norm" in name.lower()
        parameter.requires_grad_(stays_trainable and not only_adapters)
    for path, child in paths_and_layers:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LoRALinear(child, rank, alpha))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, layer) of every linear layer inside an attention module: those whose path names
    a parent with "attn" or "attention" in its name. Feed-forward layers, router and head are left
    out."""
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        parent_names = path.split(".")[:-1]
        if is_linear and any("attn" in part or "attention" in part for part in parent_names):
            yield path, module


def merge_lora(model: nn.Module) -> None:
    """Replace every LoRALinear in the model by its base layer with the adapters added to the
    weights, and make all parameters trainable again."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRALinear):
                setattr(parent, name, child.merge_into_base())
    model.requires_grad_(True)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let every LoRALinear of the model compute its base layer only, inside the block."""
    adapters = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def save_adapter(model: Any, folder: Path, base_folder: Path) -> None:
    """Write the adapters of the model to `folder` in the format of peft.

    model: one after `add_lora`, before `merge_lora`. base_folder: the folder of the weights that
    the adapters are to be added to.
    """
    adapters = {n: m for n, m in model.named_modules() if isinstance(m, LoRALinear)}
    tensors = {}
    first_adapter = next(iter(adapters.values()))
    for name, adapter in adapters.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = adapter.down.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = adapter.up.detach().contiguous()
    rank = first_adapter.down.shape[0]
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": first_adapter.scale * rank,
        "target_modules": sorted(adapters),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": first_adapter.transposed,
        "base_model_name_or_path": str(base_folder),
        "inference_mode": True,
    }
    make_subfolder(folder)
    write_atomically(folder / ADAPTER_WEIGHTS, save(tensors, {"format": "pt"}))
    write_atomically(folder / ADAPTER_CONFIG, strict_json(adapter_config, indent=2) + "\n")
