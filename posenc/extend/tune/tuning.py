"""Fine-tune a stretched checkpoint at its new length; stops and resumes without a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.extend.tune.lora import add_lora, merge_lora
from posenc.hf.text import Windows
from posenc.report.atomic import write_atomically

STATE, TENSORS = "tune.json", "tune-{step}.safetensors"
SAVE_EVERY = 50


@dataclass(frozen=True)
class TuneConfig:
    """How to tune; the defaults are Position Interpolation's, fitted to the model's size.

    Args:
        steps: optimizer steps.
        batch: windows per step.
        lr: peak learning rate; None: 2e-5 for models of a billion parameters or more, as in the
            papers, and growing with the inverse root of the size below, up to 1e-3.
        warmup: steps of linear warm-up; from half of the steps on the rate falls to zero.
        lora_rank: rank of the adapters; None tunes all weights.
        seed: of the order of windows.
        short_share: share of batches cut to the trained length, so that short texts are not
            forgotten.
        distill: within the trained length learn what the checkpoint predicted before it was
            stretched, not the text; takes a copy of the weights. Causal models only.

    Source: Chen et al. 2023, arXiv:2306.15595, section 3.1 (AdamW 0.9/0.95, no weight decay, 20
    warm-up steps).
    """

    steps: int
    batch: int = 4
    lr: float | None = None
    warmup: int = 20
    lora_rank: int | None = None
    seed: int = 0
    short_share: float = 0.4
    distill: bool = True

    def schedule(self, step: int) -> float:
        """The share of the peak rate at a step."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (0.5 * self.steps))

    def rate(self, parameters: int) -> float:
        if self.lr is not None:
            return self.lr
        return min(1e-3, 2e-5 * math.sqrt(max(1.0, 1e9 / parameters)))


def tune(
    model: Any,
    windows: Windows,
    trained: int,
    config: TuneConfig,
    folder: Path,
    progress: Callable[[str, float], None],
    mask_token: int | None = None,
    teacher: Any = None,
) -> list[float]:
    """Train on the windows in place; the loss of each step in nats. `folder` holds what a restart
    needs; with a mask token the model learns to fill in hidden tokens; `teacher` is the checkpoint
    as it was, where its predictions are to be kept.

    Raises: ValueError where the folder holds the state of another tuning; RuntimeError if the loss
    is not finite.
    """
    torch.manual_seed(config.seed)
    size = sum(p.numel() for p in model.parameters())
    if config.lora_rank is not None:
        add_lora(model, config.lora_rank, 2.0 * config.lora_rank)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), betas=(0.9, 0.95), weight_decay=0.0)
    losses = _restore(folder, config, trainable, optimizer)
    model.train()
    for step in range(len(losses), config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.rate(size) * config.schedule(step)
        tokens = _batch(windows, trained, config, step)
        loss = (
            _loss(model, tokens, trained, teacher)
            if mask_token is None
            else _masked_loss(model, tokens, mask_token)
        )
        if not math.isfinite(loss.item()):
            raise RuntimeError(
                f"tuning: the loss is {loss.item()} at step {step}; lower the learning rate."
            )
        loss.backward()
        nn.utils.clip_grad_norm_(trainable.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        progress(f"tuning, loss {losses[-1]:.3f}", (step + 1) / config.steps)
        if (step + 1) % SAVE_EVERY == 0:
            _save(folder, config, trainable, optimizer, losses)
    model.eval()
    if config.lora_rank is not None:
        merge_lora(model)
    return losses


def _batch(windows: Windows, trained: int, config: TuneConfig, step: int) -> Tensor:
    """The step's windows: a pure function of the seed and the step's number."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    rows = torch.randint(0, len(windows), (config.batch,), generator=generator)
    tokens = windows.tokens[rows]
    if float(torch.rand((), generator=generator)) < config.short_share:
        pieces = tokens.shape[1] // trained
        tokens = tokens[:, : pieces * trained].reshape(-1, trained)
    return tokens


def _loss(model: Any, tokens: Tensor, trained: int, teacher: Any) -> Tensor:
    """Mean nats: over the text, or up to the trained length over what the teacher predicts."""
    logits = model(tokens, use_cache=False).logits[:, :-1].float()
    known = 0 if teacher is None else min(trained, logits.shape[1])
    far = F.cross_entropy(
        logits[:, known:].flatten(0, 1), tokens[:, known + 1 :].flatten(), reduction="sum"
    )
    if teacher is None:
        return far / tokens[:, 1:].numel()
    with torch.no_grad():
        wanted = teacher(tokens[:, :known], use_cache=False).logits.float().softmax(-1)
    near = F.cross_entropy(logits[:, :known].flatten(0, 1), wanted.flatten(0, 1), reduction="sum")
    return (near + far) / tokens[:, 1:].numel()


def _masked_loss(model: Any, tokens: Tensor, mask_token: int) -> Tensor:
    # The batch is a function of the step, and so are the hidden tokens: a restart repeats them.
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    hidden = torch.rand(tokens.shape, generator=generator) < 0.15
    logits = model(tokens.masked_fill(hidden, mask_token)).logits
    return F.cross_entropy(logits[hidden].float(), tokens[hidden])


def _save(
    folder: Path, config: TuneConfig, trainable: dict[str, nn.Parameter], optimizer:
    torch.optim.Optimizer,
    losses: list[float],
) -> None:  # fmt: skip
    tensors = {f"weight/{name}": p.detach() for name, p in trainable.items()}
    for name, p in trainable.items():
        tensors |= {f"{key}/{name}": value for key, value in optimizer.state[p].items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TENSORS.format(step=len(losses))
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, path)
    # The JSON is replaced last, so that it never names tensors that are not there.
    write_atomically(folder / STATE, json.dumps({"config": asdict(config), "losses": losses}))
    for old in folder.glob(TENSORS.format(step="*")):
        if old != path:
            old.unlink()


def _restore(
    folder: Path,
    config: TuneConfig,
    trainable: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    path = folder / STATE
    if not path.exists():
        return []
    state = json.loads(path.read_text(encoding="utf-8"))
    if state["config"] != asdict(config):
        raise ValueError(
            f"{folder} holds a tuning with other settings: {state['config']}. Remove it or use "
            "them."
        )
    losses = state["losses"]
    tensors = load_file(folder / TENSORS.format(step=len(losses)))
    for name, p in trainable.items():
        p.data.copy_(tensors[f"weight/{name}"])
        optimizer.state[p] = {
            key: tensors[f"{key}/{name}"] for key in ("exp_avg", "exp_avg_sq", "step")
        }
    return losses
