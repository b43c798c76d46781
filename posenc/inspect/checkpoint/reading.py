"""Run a sentence through a model: attention, hidden states, logits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from posenc.command_line.errors import one_line
from posenc.inspect.checkpoint.positions import DISENTANGLED_METHODS


@dataclass(frozen=True)
class Reading:
    """What a model computes for one text.

    attention: (layers, heads, length, length) by stack, "" if there is one. hidden: (layers + 1,
    length, width) of the stack that reads the text, embeddings first. The last is the last layer's
    output before the final norm. logits: (length, vocabulary); with two stacks, of the decoder's
    first token.
    """

    attention: dict[str, Tensor]
    hidden: Tensor
    logits: Tensor

    @property
    def causal(self) -> bool:
        """Return True if no token of the text attends to a later one, as measured."""
        weights = next(iter(self.attention.values()))
        return not weights.triu(1).any()

    def distances(self) -> dict[str, Tensor]:
        """Return the mean distance of attention in tokens, (layers, heads), by stack."""
        return {name: mean_distance(weights) for name, weights in self.attention.items()}


def mean_distance(weights: Tensor) -> Tensor:
    """Return sum_j weight[i, j] |i - j|, averaged over queries i; weights (..., length, length)."""
    positions = torch.arange(weights.shape[-1], dtype=weights.dtype)
    return (weights * (positions[:, None] - positions).abs()).sum(-1).mean(-1)


@torch.inference_mode()
def read_sentence(model: Any, ids: Sequence[int]) -> Reading:
    """Run the model on the token ids of one sentence, and return its attention, states and logits.

    Raises: ValueError if it does not run, or returns no attention weights.
    """
    name = model.config.model_type
    inputs = _model_arguments(model, ids)
    with recorded_last_layers(model) as handed_on:
        try:
            out = model(**inputs, output_attentions=True, output_hidden_states=True)
        except Exception as error:  # some configs build a model whose own parts do not fit
            raise ValueError(
                f"A {name} model of this config does not run: its own code raises {one_line(error)}"
            ) from error
    has_two_stacks = model.config.is_encoder_decoder
    if has_two_stacks:
        attention = {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions}
        hidden = out.encoder_hidden_states
        logits = out.logits[0, :1]
    else:
        attention = {"": out.attentions}
        hidden = out.hidden_states
        logits = out.logits[0]
    if any(not layers or layers[0] is None for layers in attention.values()):
        raise ValueError(f"A {name} model shows no attention weights.")
    if not has_two_stacks and _shapes_differ(out.attentions):
        raise ValueError(f"The layers of a {name} model look at different numbers of keys.")
    _check_states(name, hidden, logits)
    states = [*hidden[:-1], _last_states_before_norm(hidden, handed_on)]
    return Reading(
        {stack: _without_batch(layers) for stack, layers in attention.items()},
        _without_batch(states),
        logits,
    )


def _check_states(name: str, hidden: Sequence[Tensor], logits: Tensor) -> None:
    """Raise ValueError for states that cannot be compared between layers."""
    if _shapes_differ(hidden):
        raise ValueError(f"The layers of a {name} model hand on states of different shapes.")
    if not all(state.isfinite().all() for state in (*hidden, logits)):
        raise ValueError(
            "The model's states are NaN or infinite on this sentence: its weights overflow, so "
            "nothing can be measured."
        )


def _model_arguments(model: Any, ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the arguments of the model's forward: the text as a batch of one. A decoder beside an
    encoder is given it as well, after its start token."""
    tokens = torch.tensor([ids])
    if not model.config.is_encoder_decoder:
        return {"input_ids": tokens}
    start = tokens.new_full((1, 1), model.config.decoder_start_token_id)
    return {
        "input_ids": tokens,
        "decoder_input_ids": torch.cat([start, tokens[:, :-1]], dim=-1),
    }


def _shapes_differ(tensors: Sequence[Tensor]) -> bool:
    """Return True if not all tensors have the same shape."""
    return len({tensor.shape for tensor in tensors}) > 1


def _without_batch(layers: Sequence[Tensor]) -> Tensor:
    """Return the tensors of all layers, each (1, ...), as one tensor (layers, ...)."""
    return torch.stack([layer[0] for layer in layers])


@contextmanager
def recorded_last_layers(model: Any) -> Iterator[list[tuple[int, Tensor]]]:
    """Record, inside the block and in the order of running, the output of the last module of each
    nn.ModuleList, with the list's length."""
    outputs: list[tuple[int, Tensor]] = []

    def record_output(count: int, module: nn.Module, inputs: Any, returned: Any) -> None:
        state = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(state, Tensor):
            outputs.append((count, state))

    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    hooks = [
        stack[-1].register_forward_hook(partial(record_output, len(stack))) for stack in stacks
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _last_states_before_norm(
    hidden: Sequence[Tensor], handed_on: Sequence[tuple[int, Tensor]]
) -> Tensor:
    """Return the last layer's states before the final norm, which transformers returns only after
    it; those after the norm if no recorded output fits.

    hidden: states as transformers returns them. handed_on: outputs by `recorded_last_layers`.
    """
    # The first that fits: the stack that reads the text runs first.
    count = len(hidden) - 1
    shape = hidden[-1].shape
    fitting = (state for layers, state in handed_on if layers == count and state.shape == shape)
    return next(fitting, hidden[-1])


def attention_by_group(weights: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """Return attention between groups of tokens, (..., groups, groups): the sum over the keys of a
    group, the mean over its queries, so that rows still sum to 1.

    weights: (..., length, length). groups: first and last + 1 of each.
    """
    keys = torch.stack([weights[..., a:b].sum(-1) for a, b in groups], dim=-1)
    return torch.stack([keys[..., a:b, :].mean(-2) for a, b in groups], dim=-2)


@contextmanager
def recorded_relative_scores(model: Any) -> Iterator[list[Tensor]]:
    """Record, inside the block, the terms that DeBERTa's first layer adds to its scores, (heads,
    length, length)."""
    terms: list[Tensor] = []
    owner: nn.Module | None = None
    name = ""
    for module, candidate in product(model.modules(), DISENTANGLED_METHODS):
        if hasattr(module, candidate):
            owner = module
            name = candidate
            break
    if owner is None:
        yield terms
        return
    method = getattr(owner, name)

    def record_terms(*args: Any, **kwargs: Any) -> Tensor:
        added = method(*args, **kwargs)
        terms.append(added.reshape(-1, *added.shape[-2:]))
        return added

    setattr(owner, name, record_terms)
    try:
        yield terms
    finally:
        delattr(owner, name)
