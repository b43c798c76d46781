"""Low-rank adapters on a model's attention projections, merged into the weights when done."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from posenc.files.atomic import write_atomically
from posenc.files.opening import make_subfolder
from posenc.files.sealed_json import strict_json

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
        # GPT-2's Conv1D keeps (in, out).
        rows, columns = self._weight.shape
        self.transposed = not isinstance(base, nn.Linear)
        inputs, outputs = (rows, columns) if self.transposed else (columns, rows)
        self.down = nn.Parameter(self._weight.new_empty(rank, inputs, dtype=torch.float32))
        self.up = nn.Parameter(self._weight.new_zeros(outputs, rank, dtype=torch.float32))
        # As the LoRA authors' code and nn.Linear do it.
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    @property
    def _weight(self) -> Tensor:
        """Return the frozen weight of the base layer."""
        assert isinstance(self.base.weight, Tensor)
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the base layer plus that of the adapters, in the dtype of `x`."""
        added = (x.to(self.down.dtype) @ self.down.T @ self.up.T) * self.scale
        return self.base(x) + added.to(x.dtype)

    @torch.no_grad()
    def merge_into_base(self) -> nn.Module:
        """Add the adapters to the weights of the layer, in place, and return the layer."""
        change = self.up @ self.down * self.scale
        self._weight.add_((change.T if self.transposed else change).to(self._weight.dtype))
        return self.base


def add_lora(
    model: nn.Module, rank: int = 8, alpha: float = 16.0, *, only_adapters: bool = False
) -> int:
    """Replace the model's attention projections by LoRALinear, in place, and freeze all other
    parameters but, unless `only_adapters`, those of embeddings and norms, as LongLoRA does.

    Returns: the number of trainable parameters, each of their elements counted.
    Raises: ValueError if no projection is found; the model is then unchanged.
    """
    layers = list(projections(model))
    if not layers:
        raise ValueError("LoRA: found no projections of attention; tune the full model instead.")
    for name, parameter in model.named_parameters():
        stays_trainable = "embed" in name or "norm" in name.lower()
        parameter.requires_grad_(stays_trainable and not only_adapters)
    for path, child in layers:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LoRALinear(child, rank, alpha))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, layer) of every linear layer inside an attention module: those whose path names
    a parent with "attn" or "attention" in its name. Feed-forward layers, router and head are left
    out."""
    for path, module in model.named_modules():
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        above = path.split(".")[:-1]
        if linear and any("attn" in part or "attention" in part for part in above):
            yield path, module


def merge_lora(model: nn.Module) -> None:
    """Replace every LoRALinear in the model by its base layer with the adapters added to the
    weights, and make all parameters trainable again."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRALinear):
                setattr(parent, name, child.merge_into_base())
    model.requires_grad_(True)


def save_adapter(model: Any, folder: Path, base: Path) -> None:
    """Write the adapters of the model to `folder` in the format of peft.

    model: one after `add_lora`, before `merge_lora`. base: the folder of the weights that the
    adapters are to be added to.
    """
    adapters = {n: m for n, m in model.named_modules() if isinstance(m, LoRALinear)}
    tensors = {}
    first = next(iter(adapters.values()))
    for name, adapter in adapters.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = adapter.down.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = adapter.up.detach().contiguous()
    rank = first.down.shape[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": first.scale * rank,
        "target_modules": sorted(adapters),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": first.transposed,
        "base_model_name_or_path": str(base),
        "inference_mode": True,
    }
    make_subfolder(folder)
    write_atomically(folder / ADAPTER_WEIGHTS, save(tensors, {"format": "pt"}))
    write_atomically(folder / ADAPTER_CONFIG, strict_json(config, indent=2) + "\n")
