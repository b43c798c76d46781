"""Fine-tune a stretched checkpoint at its new length, all weights or low-rank adapters.

Stopping and resuming changes nothing on the CPU; on CUDA gradients may be added in any order.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.command_line.errors import RunFailed
from posenc.files.atomic import write_atomically
from posenc.files.opening import make_subfolder, path_in_folder, read_file_bytes
from posenc.files.sealed_json import strict_json
from posenc.hf.checkpoint.tokenization import Windows
from posenc.hf.restart_state import (
    Identity,
    discard_damaged_state,
    identity_of_run,
    read_sealed,
    sha256,
    write_sealed,
)
from posenc.hf.tune_config import TuneConfig

MASKED_SHARE = 0.15
"""Fraction of tokens that are masked, in tuning and in measuring, as in BERT."""
SAVE_EVERY = 50
"""Steps between two saved states; chosen, not derived."""
STEP_SEED_STRIDE = 1_000_003
"""Distance between the seeds of two runs, above any number of steps: no two share a step's seed."""
TrainableParameters = dict[str, nn.Parameter]
"""The weights that are tuned, by name."""
TUNING_STATE_FILE = "tune.json"
TUNING_TENSORS_FILE = "tune-{step}.safetensors"
ADAMW_STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of each weight."""


def tune(
    model: Any,
    windows: Windows,
    train_length: int,
    config: TuneConfig,
    folder: Path,
    progress: Callable[[str, float], None],
    mask_token_id: int | None = None,
    teacher: Any = None,
    keep_adapter: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train the model in place on the windows, and return the loss of each step in nats.

    Args:
        model: the model, with the rotation for the new length.
        windows: text in windows of the new length.
        train_length: the length in tokens that the model was trained at before.
        config: how to train.
        folder: for the state of restarts.
        progress: called with what is done and the fraction of it that is done.
        mask_token_id: id of the token that hides tokens, if masked tokens are to be predicted;
            None to predict the next token.
        teacher: the original model, if its predictions are to be learned; None to learn only
            from the text.
        keep_adapter: called before adapters are merged into the weights, to save them.

    Raises: ValueError if the folder has the state of another tuning; RunFailed if the loss or a
    gradient is not finite.
    """
    torch.manual_seed(config.seed)
    # True stands for a teacher without rope keys: None, without a teacher, is another tuning.
    teacher_rotation = (
        None if teacher is None else teacher.config.to_dict().get("rope_parameters", True)
    )
    run_identity = identity_of_run(
        model,
        windows,
        tuning=config,
        trained=train_length,
        mask_token=mask_token_id,
        teacher=teacher_rotation,
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    if config.lora_rank:
        rank = config.lora_rank
        alpha = 2.0 * rank  # chosen, not derived: adapters act at twice their product
        add_lora(model, rank, alpha, only_adapters=config.adapter)
    if config.recompute:
        _set_gradient_checkpointing(model, True)
    trainable_parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trainable_parameters.values(), betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = restore_tuning(folder, run_identity, trainable_parameters, optimizer)
    model.train()
    for step in range(len(losses), config.steps):
        # Dropout, too, depends on the step only, so that a restart drops the same numbers.
        torch.manual_seed(config.seed * STEP_SEED_STRIDE + step)
        _set_learning_rate(optimizer, config.rate(num_parameters) * config.schedule(step))
        tokens = step_tokens(windows, train_length, config, step)
        if mask_token_id is None:
            loss = next_token_loss(model, tokens, train_length, teacher)
        else:
            loss = masked_token_loss(model, tokens, mask_token_id)
        _take_optimizer_step(loss, trainable_parameters, optimizer, step)
        losses.append(loss.item())
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == config.steps:
            save_tuning(folder, run_identity, trainable_parameters, optimizer, losses)
        progress(f"tuning, loss {losses[-1]:.3f}", (step + 1) / config.steps)
    _finish_tuning(model, config, keep_adapter)
    return losses


def _set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _take_optimizer_step(
    loss: Tensor,
    trainable_parameters: TrainableParameters,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> None:
    """Change the weights by one step down the gradient of the loss.

    Raises: RunFailed, before any weight changes, if the loss or the gradient is not finite.
    """
    loss.backward()
    gradient_norm = nn.utils.clip_grad_norm_(trainable_parameters.values(), 1.0)
    if not (math.isfinite(loss.item()) and math.isfinite(gradient_norm.item())):
        raise RunFailed(
            f"tuning: the loss is {loss.item()}, its gradient {gradient_norm.item()} long at step "
            f"{step}; lower the learning rate."
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _finish_tuning(model: Any, config: TuneConfig, keep_adapter: Callable[[], None]) -> None:
    """Turn off training mode and gradient checkpointing, save the adapters if they are asked for,
    and merge them into the weights."""
    model.eval()
    if config.recompute:
        _set_gradient_checkpointing(model, False)
    if config.adapter:
        keep_adapter()
    if config.lora_rank:
        merge_lora(model)


def _set_gradient_checkpointing(model: Any, is_on: bool) -> None:
    """Turn transformers' gradient checkpointing on or off."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"--recompute: {type(model).__name__} has no such code in transformers.")
    # The older name warns where there is the newer one.
    has_newer_name = hasattr(model, "activation_checkpointing_enable")
    name_prefix = "activation" if has_newer_name else "gradient"
    getattr(model, f"{name_prefix}_checkpointing_{'enable' if is_on else 'disable'}")()
    if not is_on:
        model.disable_input_require_grads()  # which the other call let embeddings have


def step_tokens(windows: Windows, train_length: int, config: TuneConfig, step: int) -> Tensor:
    """Return the tokens of one step, (rows, length), which depend on the seed and the step only.
    With probability `short_share` the windows are cut into rows of the training length."""
    generator = torch.Generator().manual_seed(config.seed * STEP_SEED_STRIDE + step)
    window_indices = torch.randint(0, len(windows), (config.batch,), generator=generator)
    tokens = windows.tokens[window_indices]
    if float(torch.rand((), generator=generator)) < config.short_share:
        num_pieces = tokens.shape[1] // train_length
        tokens = tokens[:, : num_pieces * train_length].reshape(-1, train_length)
    return tokens


def next_token_loss(model: Any, tokens: Tensor, train_length: int, teacher: Any) -> Tensor:
    """Return the mean loss in nats of predicting each next token: against the text or, with a
    teacher, up to the training length `train_length` against the teacher's predictions."""
    tokens = tokens.to(model.device)
    logits = model(tokens, use_cache=False).logits[:, :-1].float()
    taught_len = 0 if teacher is None else min(train_length, logits.shape[1])
    loss_from_text = F.cross_entropy(
        logits[:, taught_len:].flatten(0, 1), tokens[:, taught_len + 1 :].flatten(), reduction="sum"
    )
    if teacher is None:
        return loss_from_text / tokens[:, 1:].numel()
    with torch.no_grad():
        teacher_probabilities = (
            teacher(tokens[:, :taught_len], use_cache=False).logits.float().softmax(-1)
        )
    loss_from_teacher = F.cross_entropy(
        logits[:, :taught_len].flatten(0, 1), teacher_probabilities.flatten(0, 1), reduction="sum"
    )
    return (loss_from_teacher + loss_from_text) / tokens[:, 1:].numel()


def masked_token_loss(model: Any, tokens: Tensor, mask_token_id: int) -> Tensor:
    """Return the mean loss in nats of the tokens that are replaced by `mask_token_id`: about
    MASKED_SHARE of them, and at least one.

    tokens: (rows, length). They determine which ones are replaced, so that a restart masks the
    same.
    """
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    draws = torch.rand(tokens.shape, generator=generator)
    # Of a few tokens none may be drawn, and the mean over none is NaN: the smallest is masked.
    is_masked = (draws < MASKED_SHARE) | (draws == draws.min())
    logits = model(tokens.masked_fill(is_masked, mask_token_id).to(model.device)).logits
    return F.cross_entropy(
        logits[is_masked.to(logits.device)].float(), tokens[is_masked].to(logits.device)
    )


def save_tuning(
    folder: Path,
    run_identity: Identity,
    trainable_parameters: TrainableParameters,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
) -> None:
    """Save the trained weights, the state of the optimizer and the losses so far to `folder`, and
    delete the older state.

    run_identity: hashes of everything that the tuning depends on, as `identity_of_run` returns
    them. They are saved, too, so that no other tuning starts from this state.
    """
    tensors: dict[str, Tensor] = {f"weight/{name}": p for name, p in trainable_parameters.items()}
    for name, p in trainable_parameters.items():
        tensors |= {f"{key}/{name}": optimizer.state[p][key] for key in ADAMW_STATE_KEYS}
    tensor_bytes = save({name: t.detach().contiguous().clone() for name, t in tensors.items()})
    path = folder / TUNING_TENSORS_FILE.format(step=len(losses))
    make_subfolder(folder)
    write_atomically(path, tensor_bytes)
    # The JSON is replaced last, so that it never names tensors that are not there.
    record = {"losses": losses, "tensors": path.name, "tensors_sha256": sha256(tensor_bytes)}
    write_sealed(folder / TUNING_STATE_FILE, run_identity, record)
    for old_file in folder.glob(TUNING_TENSORS_FILE.format(step="*")):
        if old_file != path:
            old_file.unlink()


def restore_tuning(
    folder: Path,
    run_identity: Identity,
    trainable_parameters: TrainableParameters,
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    """Load a saved state into the weights and the optimizer, and return the losses of its steps; []
    if there is no complete state.

    run_identity: as of `save_tuning`.

    Raises: ValueError if the folder has the state of another tuning.
    """
    record = read_sealed(folder / TUNING_STATE_FILE, run_identity)
    if record is None:
        return []
    try:
        tensor_bytes = read_file_bytes(path_in_folder(folder, record["tensors"]), None)
        if sha256(tensor_bytes) != record["tensors_sha256"]:
            raise ValueError(f"{record['tensors']} is not what was written")
        tensors = load(tensor_bytes)
    except (OSError, ValueError, SafetensorError) as error:
        discard_damaged_state(folder / TUNING_STATE_FILE, error)
        return []
    with torch.no_grad():
        for name, p in trainable_parameters.items():
            p.copy_(tensors[f"weight/{name}"])
            moments = {key: tensors[f"{key}/{name}"] for key in ADAMW_STATE_KEYS}
            # AdamW keeps its count of steps on the CPU.
            optimizer.state[p] = {
                key: moment if key == "step" else moment.to(p.device)
                for key, moment in moments.items()
            }
    return record["losses"]


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
        in_features, out_features = (rows, columns) if self.transposed else (columns, rows)
        self.down = nn.Parameter(self._weight.new_empty(rank, in_features, dtype=torch.float32))
        self.up = nn.Parameter(self._weight.new_zeros(out_features, rank, dtype=torch.float32))
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
        weight_change = self.up @ self.down * self.scale
        self._weight.add_(
            (weight_change.T if self.transposed else weight_change).to(self._weight.dtype)
        )
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
