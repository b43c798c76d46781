"""Choose what a tuning step reads, and compute the loss that it lowers."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.extend.tune.config import TuneConfig
from posenc.hf.checkpoint.text import Windows


def step_tokens(windows: Windows, trained: int, config: TuneConfig, step: int) -> Tensor:
    """Return the step's windows, a pure function of the seed and the step."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    rows = torch.randint(0, len(windows), (config.batch,), generator=generator)
    tokens = windows.tokens[rows]
    if float(torch.rand((), generator=generator)) < config.short_share:
        pieces = tokens.shape[1] // trained
        tokens = tokens[:, : pieces * trained].reshape(-1, trained)
    return tokens


def next_token_loss(model: Any, tokens: Tensor, trained: int, teacher: Any) -> Tensor:
    """Return the mean loss in nats: over the text or, up to the training length, against the
    teacher's predictions."""
    tokens = tokens.to(model.device)
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


def masked_token_loss(model: Any, tokens: Tensor, mask_token: int) -> Tensor:
    """Return the mean loss in nats over hidden tokens. The text determines which are hidden, so
    that a restart hides the same."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    hidden = torch.rand(tokens.shape, generator=generator) < 0.15
    logits = model(tokens.masked_fill(hidden, mask_token).to(model.device)).logits
    return F.cross_entropy(
        logits[hidden.to(logits.device)].float(), tokens[hidden].to(logits.device)
    )
