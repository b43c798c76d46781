"""Exchange two words of a sentence, with the model's positions and without."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posenc.hf.attachment.builtin_positions import IdentityRotation
from posenc.hf.checkpoint.loading import language_model_of
from posenc.inspect.checkpoint.positions import DISENTANGLED_METHODS, TABLE_NAMES
from posenc.inspect.checkpoint.reading import Reading, Sentence, Span, read_sentence

ALIBI_ARGUMENTS = {"BloomAttention": "alibi", "MptAttention": "position_bias"}
"""The argument that passes the bias to a layer's attention."""
LARGEST_ROUNDING_DIFFERENCE = 1e-5
"""Smaller relative differences are float32 sums in another order; chosen, not derived."""


@dataclass(frozen=True)
class SwapEffect:
    """Changes of states and predictions when two words are exchanged, with positions or without.

    Changes of states are relative: the length of the difference over the length of the state.
    by_group: change of the last layer's state of each group of tokens (see `Sentence`), between its
        old and its new place.
    last_by_layer, all_by_layer: largest change of the last token, and of all tokens; entry 0 is the
        embeddings.
    logits: largest change of a logit at the last token (masked models: at any token). divergence:
        KL divergence there from the old distribution to the new one, in nats. Both are None for a
        model without a head.
    """

    by_group: list[float]
    last_by_layer: list[float]
    all_by_layer: list[float]
    logits: float | None
    divergence: float | None


@dataclass(frozen=True)
class Swap:
    """An exchange of two words, and what it changes.

    order: for each place of the new sequence, the old place of its token. last_stays: True if the
    last token comes after both words. removed: descriptions of the positions that were removed for
    `without`; if nothing could be removed, it is empty and `without` is None.
    """

    words: tuple[str, str]
    order: list[int]
    causal: bool
    last_stays: bool
    removed: list[str]
    with_positions: SwapEffect
    without: SwapEffect | None

    def by_layer(self, effect: SwapEffect) -> list[float]:
        """Return how far states move in each layer: the state of the last token in a causal model,
        else the state of the token that moves farthest. effect: `with_positions` or `without`."""
        return effect.last_by_layer if self.causal else effect.all_by_layer


def exchanged_order(length: int, a: Span, b: Span) -> list[int]:
    """Return the old place of each token after two spans of tokens, (first, last + 1), have changed
    places: exchanged_order(5, (1, 2), (3, 4)) -> [0, 3, 2, 1, 4].

    Raises: ValueError where the spans overlap.
    """
    (a_start, a_stop), (b_start, b_stop) = sorted((a, b))
    if b_start < a_stop:
        raise ValueError("--swap: the two words overlap or are the same.")
    places = range(length)
    first = places[a_start:a_stop]
    between = places[a_stop:b_start]
    second = places[b_start:b_stop]
    return [*places[:a_start], *second, *between, *first, *places[b_stop:]]


def swap_words(model: Any, sentence: Sentence, words: tuple[str, str], masked: bool) -> Swap:
    """Return what changes if two words of the sentence exchange their tokens, so that only the
    order differs: with the model's positions, and without.

    masked: True for a model that predicts masked tokens.

    Raises: ValueError if the sentence lacks a word.
    """
    spans = [sentence.tokens_of(word) for word in words]
    order = exchanged_order(len(sentence), *spans)
    ids = [sentence.ids[i] for i in order]
    last_span_stop = max(b for _, b in spans)

    def measure_exchange() -> tuple[SwapEffect, Reading]:
        """Return what the exchange changes in the present model, and the reading before it."""
        before = read_sentence(model, sentence.ids)
        after = read_sentence(model, ids)
        return _compare_readings(before, after, order, sentence, masked), before

    with_positions, before = measure_exchange()
    with without_positions(model) as removed:
        without = measure_exchange()[0] if removed else None
    return Swap(
        words,
        order,
        before.causal,
        last_span_stop < len(sentence),
        removed,
        with_positions,
        without,
    )


def _compare_readings(
    before: Reading, after: Reading, order: Sequence[int], sentence: Sentence, masked: bool
) -> SwapEffect:
    """Return how much states and predictions differ between two readings of the same tokens.

    order: for each place in `after`, the place of the same token in `before`.
    """
    old_states = before.hidden_states[:, torch.tensor(order)]  # the same words side by side
    gaps = (after.hidden_states - old_states).norm(dim=-1) / old_states.norm(dim=-1).clamp(
        min=1e-30
    )  # of zeros
    # Back to the places of the original sentence.
    original_places = torch.tensor(order).argsort()
    last_layer_gaps = gaps[-1, original_places]
    logits_change, divergence = _compare_predictions(before.logits, after.logits, order, masked)
    return SwapEffect(
        by_group=[last_layer_gaps[a:b].max().item() for a, b in sentence.groups],
        last_by_layer=gaps[:, -1].tolist(),
        all_by_layer=gaps.amax(-1).tolist(),
        logits=logits_change,
        divergence=divergence,
    )


def _compare_predictions(
    old_logits: Tensor | None, new_logits: Tensor | None, order: Sequence[int], masked: bool
) -> tuple[float | None, float | None]:
    """Return the largest change of a logit and of a prediction, see `SwapEffect`; None and None for
    a model without a head. order, masked: as of `_compare_readings`, `swap_words`."""
    if old_logits is None or new_logits is None:
        return None, None
    if masked:  # a prediction at each token, else only the next token's, at the last one
        old_logits = old_logits[torch.tensor(order)]
    else:
        new_logits = new_logits[-1:]
        old_logits = old_logits[-1:]
    old_log_probs = old_logits.log_softmax(-1)
    new_log_probs = new_logits.log_softmax(-1)
    divergences = (old_log_probs.exp() * (old_log_probs - new_log_probs)).sum(-1)
    return (new_logits - old_logits).abs().max().item(), divergences.max().item()


@contextmanager
def without_positions(model: nn.Module) -> Iterator[list[str]]:
    """Remove the positions of the model's text inside the `with`, so that only its mask depends on
    order.

    Rotations become the identity; rows of tables, T5's biases, and ALiBi's and DeBERTa's terms of
    the scores become zero. Afterwards everything is as before.

    Yields: descriptions of the removed parts.
    """
    removed_descriptions: list[str] = []
    with ExitStack() as undo_stack:
        for path, module in language_model_of(model).named_modules():
            if removed_description := _silence_positions(path, module, undo_stack):
                removed_descriptions.append(removed_description)
        yield removed_descriptions


def _silence_positions(path: str, module: nn.Module, undo_stack: ExitStack) -> str | None:
    """Take the positions out of one module until `undo_stack` runs; return a description of what
    was taken out, or None if the module has no positions."""
    name = path.rpartition(".")[2]
    if "RotaryEmbedding" in type(module).__name__:
        hook = module.register_forward_hook(IdentityRotation())
        undo_stack.callback(hook.remove)
        return f"the rotation {path}"
    if isinstance(module, nn.Embedding) and name in (*TABLE_NAMES, "relative_attention_bias"):
        weights_before = module.weight.detach().clone()
        _overwrite_weight(module.weight, torch.zeros_like(weights_before))
        undo_stack.callback(_overwrite_weight, module.weight, weights_before)
        return f"the table {path}"
    sinusoids = getattr(module, "embed_positions", None)
    if isinstance(sinusoids, Tensor):  # GPT-J and CodeGen: sines, then cosines
        half = sinusoids.shape[-1] // 2
        module.embed_positions = (
            torch.tensor([0.0, 1.0]).repeat_interleave(half).expand_as(sinusoids)
        )
        undo_stack.callback(setattr, module, "embed_positions", sinusoids)
        return f"the rotation of {path}"
    if argument := ALIBI_ARGUMENTS.get(type(module).__name__):
        hook = module.register_forward_pre_hook(
            partial(_zero_bias_argument, argument), with_kwargs=True
        )
        undo_stack.callback(hook.remove)
        return f"the bias of {path}"
    # An attribute hides the class's method; without it, the method is found again.
    for method in DISENTANGLED_METHODS:
        if hasattr(module, method):
            setattr(module, method, _zeros_like_results_of(getattr(module, method)))
            undo_stack.callback(delattr, module, method)
            return f"the bias of {path}"
    return None


def _zero_bias_argument(argument: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: hand the module zeros in place of the keyword argument `argument`."""
    return args, {**kwargs, argument: torch.zeros_like(kwargs[argument])}


def _zeros_like_results_of(method: Any) -> Any:
    """Return a function that calls `method`, and returns zeros of its result's shape."""
    return lambda *args, **kwargs: torch.zeros_like(method(*args, **kwargs))


@torch.no_grad()
def _overwrite_weight(weight: Tensor, values: Tensor) -> None:
    """Write values into a weight, in place."""
    weight.copy_(values)
