"""Compute the loss of a causal language model at each position of its windows."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import explain_misfits
from posenc.hf.chunked_logits import ChunkedLogits, chunk_slices
from posenc.models.generating import eval_mode

MAX_TOKENS_PER_CALL = 2048
"""Tokens of the windows that a model reads at once, or one window where it is longer: chosen."""


@explain_misfits
@torch.no_grad()  # tensors that a model keeps from inference mode would forbid a backward pass
def losses_by_position(
    model: Callable[..., Any], tokens: Integer[Tensor, "batch length_plus_1"]
) -> Float[Tensor, " length"]:
    """Return the mean loss at each position of windows of tokens, in nats.

    loss[i] = mean over the batch of -log p(tokens[:, i + 1] | tokens[:, : i + 1])

    A model of transformers reads a window once, and its logits are computed for a few tokens at a
    time where its head can be divided from the rest, so that those of 32,000 tokens are never in
    memory together. A module is in evaluation mode meanwhile, and each of its parts has its own
    mode again afterwards.

    Args:
        model: a model of transformers, or anything that is called with tokens (batch, length) and
            returns logits (batch, length, vocabulary): by themselves, as the first of a tuple, or
            as `.logits`.
        tokens: windows of one token more than their length, (batch, length + 1), of any integer
            type; they are moved to the model's device.

    Returns: (length,), float64, on the CPU. NaN or infinite where the model's loss is.
    Raises: ValueError, TypeError for other tokens, or a model that returns no such logits.
    Source: docs/judge.md.

    >>> def guess(tokens):  # each of four tokens is as likely
    ...     return torch.zeros(*tokens.shape, 4)
    >>> losses_by_position(guess, torch.tensor([[0, 3, 1], [2, 2, 2]])).tolist()
    [1.3862943611198906, 1.3862943611198906]
    """
    _check_tokens(tokens)
    batch, num_tokens = tokens.shape
    sums = torch.zeros(num_tokens - 1, dtype=torch.float64)
    with eval_mode(model) if isinstance(model, nn.Module) else nullcontext():
        for windows in tokens.long().split(max(1, MAX_TOKENS_PER_CALL // num_tokens)):
            sums += _token_losses(model, windows).double().sum(0)
    return sums / batch


def _check_tokens(tokens: Any) -> None:
    """Raise TypeError or ValueError for anything but windows of two tokens or more."""
    is_integer = isinstance(tokens, Tensor) and not (
        tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    )
    if not is_integer:
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens must be a tensor of integers (batch, length + 1), got {got}.")
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(
            "tokens must be windows (batch, length + 1), at least one, of at least two tokens, got "
            f"the shape {tuple(tokens.shape)}."
        )


def _token_losses(model: Callable[..., Any], windows: Tensor) -> Tensor:
    """Return the losses (batch, length) of the next tokens in windows (batch, length + 1), on the
    CPU."""
    if _is_of_transformers(model):
        return _token_losses_in_chunks(model, windows)
    device = windows.device
    if isinstance(model, nn.Module):
        device = next((weight.device for weight in model.parameters()), device)
    inputs = windows[:, :-1].to(device)
    logits = _logits_of(model(inputs))
    if logits.ndim != 3 or logits.shape[:2] != inputs.shape:
        raise ValueError(
            f"the model must return logits (batch, length, vocabulary), that is "
            f"({inputs.shape[0]}, {inputs.shape[1]}, vocabulary), got {tuple(logits.shape)}."
        )
    return _cross_entropies(logits, windows[:, 1:])


def _token_losses_in_chunks(model: Any, windows: Tensor) -> Tensor:
    """Return the same of a model of transformers, a chunk of the logits at a time."""
    divided = ChunkedLogits(model)
    if divided.vocab_size > 1:  # 1: the config does not say it
        _check_vocabulary(windows, divided.vocab_size)
    hidden = divided.hidden_states(windows[:, :-1])
    targets = windows[:, 1:]
    losses = [
        _cross_entropies(divided.logits(hidden[:, positions]), targets[:, positions])
        for positions in chunk_slices(hidden, divided.vocab_size)
    ]
    return torch.cat(losses, dim=1)


def _is_of_transformers(model: Any) -> bool:
    """Return True for a language model of transformers."""
    return hasattr(model, "get_output_embeddings") and hasattr(model, "config")


def _logits_of(output: Any) -> Tensor:
    """Return the logits in what a model returned. Raises: TypeError if there are none."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(
            "the model must return a tensor of logits, a tuple that begins with one, or an object "
            f"with .logits, got {type(output).__name__}."
        )
    return logits


def _check_vocabulary(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError if one of the tokens is outside of a vocabulary."""
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocab_size:
            raise ValueError(f"the token {token:,} is outside the model's {vocab_size:,} tokens.")


def _cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of each target (batch, length) under logits (batch, length, vocabulary), in
    float32 and on the CPU. Raises: ValueError for a token outside of the vocabulary."""
    _check_vocabulary(targets, logits.shape[-1])
    targets = targets.to(logits.device)
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).cpu()
