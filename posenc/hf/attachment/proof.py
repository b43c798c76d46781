"""Prove an attached encoding on the model in hand: a few tokens read at once give what they give in
steps through the model's own cache and through a static one, and next to padding.

A release of transformers may pass its cache, its mask or its positions in a new way. Nothing would
fail then: the model would only compute other numbers.
"""

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.command_line.errors import one_line
from posenc.hf.attachment.forward_context import (
    ATTACHMENT_ATTRIBUTE,
    ENCODING_MODULE,
    LAYER_ATTRIBUTE,
)
from posenc.hf.attachment.stacks import recorded_attention, rounding_tolerance, run_in_evaluation
from posenc.hf.transformers_compat import (
    arguments_for_next_step,
    forward_takes,
    static_cache_argument,
)
from posenc.machine.fingerprint import versions
from posenc.positions.tokens import as_tensor

LOG = logging.getLogger("posenc.hf")
"""Logger of what could not be checked; it writes to stderr, and applications may redirect it."""
NUM_MISSING_TOKENS = 2
"""Tokens that the shorter row of a padded batch lacks."""


@dataclass(eq=False)
class StackOutput:
    """Hold the output of the last stack of a model, and the positions that it read.

    hidden_states: its output, (batch, len, dim). positions: those of the queries in each of its
    attentions, (batch, len) or (batch, len, axes). causal: none of its attentions looks ahead.
    model_output: what the model returned.
    """

    hidden_states: Tensor
    positions: list[Tensor]
    causal: bool
    model_output: Any

    def select(self, row_slice: slice, token_slice: slice = slice(None)) -> "StackOutput":
        """Return the outcome of some rows of the batch, and of some of their tokens."""
        positions = [p[row_slice, token_slice] for p in self.positions]
        return StackOutput(
            self.hidden_states[row_slice, token_slice], positions, self.causal, self.model_output
        )


def prove(model: Any, example: dict[str, Any]) -> None:
    """Compare short forwards of a model with an attached encoding: at once, in steps, with padding.

    They run in evaluation mode and without gradients. What cannot be compared is logged as a
    warning.

    Args:
        model: the model.
        example: arguments of one small forward.

    Raises: ValueError, naming the installed releases, if outcomes differ or a forward fails.
    """
    gpu_devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(sorted(gpu_devices, key=str)):
        proof = _Proof(model, example)
        if "pixel_values" in example and model.main_input_name == "pixel_values":
            proof.prove_patches_stay()  # images are read at once, and without padding
            return
        not_compared = proof.compare_all()
    if not_compared:
        LOG.warning("attach: %s was not checked %s.", type(model).__name__, not_compared)


class _ForwardFailed(ValueError):
    """Raised if a forward of the model stops with an exception."""


class _Proof:
    """Run short forwards of one model and compare what they compute.

    replaces_positions: True if the encoding replaces the model's own positions. has_two_stacks:
    True for an encoder-decoder. tolerance: see `rounding_tolerance`. compares_numbers: False if
    numbers of steps differ by design, so that only positions are compared. per_token_arguments:
    names of the arguments that have an entry for each token of the last stack.
    """

    def __init__(self, model: Any, example: dict[str, Any]) -> None:
        self.model = model
        self.example = example
        attachment = getattr(model, ATTACHMENT_ATTRIBUTE)
        encodings: list[Any] = [getattr(stack, ENCODING_MODULE) for stack in attachment.stacks]
        self.stack: nn.Module = attachment.stacks[-1]
        self.num_axes: int = encodings[-1].claims.num_axes
        self.replaces_positions = attachment.model_positions == "replace"
        self.has_two_stacks = len(encodings) == 2
        self.per_token_arguments = ("input_ids", "inputs_embeds", "position_ids")
        if self.has_two_stacks:
            self.per_token_arguments = ("decoder_input_ids",)
        self.tolerance = rounding_tolerance(model)
        # Dynamic NTK rotates by the length read so far: steps differ from one pass by design.
        self.compares_numbers = all(e.claims.cache_safe for e in encodings)

    def compare_all(self) -> str | None:
        """Make all comparisons. Return in words what could not be compared, and why."""
        token_arguments = [name for name in self.per_token_arguments[:2] if name in self.example]
        other_arguments = sorted(set(self.example) - set(self.per_token_arguments))
        if not token_arguments or (other_arguments and not self.has_two_stacks):
            content_in_words = ", ".join(other_arguments) or "no tokens"
            return f"in steps and with padding: its example has {content_in_words}"
        expected = self.run_finite_forward("a few tokens")
        length = expected.hidden_states.shape[1]
        if length <= NUM_MISSING_TOKENS:
            return f"in steps and with padding: its example has {length} tokens"
        bounds = sorted({0, length // 2, length - 1, length})
        stepwise_output = self.read_in_steps(self.example, bounds)
        if stepwise_output is not None:
            self.compare("in steps through its own cache", stepwise_output, expected)
            if (static_output := self.read_through_static_cache(self.example, bounds)) is not None:
                self.compare("in steps through a static cache", static_output, expected)
        if "input_ids" in self.example and forward_takes(self.model, "attention_mask"):
            self.prove_padding(expected, cached=stepwise_output is not None)
        if stepwise_output is None and expected.causal and forward_takes(self.model, "use_cache"):
            return "in steps: it returned no cache"
        return None

    def run_finite_forward(self, example_in_words: str) -> StackOutput:
        """Return the outcome of the example. Raise ValueError, which calls the example
        `example_in_words`, if it is NaN or infinite."""
        outcome = self.run_forward(self.example)
        if not outcome.hidden_states.isfinite().all():
            raise ValueError(
                f"attach: {type(self.model).__name__} returns NaN or infinity for "
                f"{example_in_words}, so that nothing can be checked. Load its weights first, or "
                "attach with check=False."
            )
        return outcome

    def prove_patches_stay(self) -> None:
        """Raise ValueError if two forwards of one image differ. ViTMAE draws the patches that it
        keeps, and their order, which no attention sees."""
        first_output = self.run_finite_forward("an image")
        second_output = self.run_forward(self.example)
        has_same_shape = first_output.hidden_states.shape == second_output.hidden_states.shape
        largest = float(first_output.hidden_states.abs().max())
        if (
            has_same_shape
            and (first_output.hidden_states - second_output.hidden_states).abs().max()
            <= self.tolerance * largest
        ):
            return
        raise ValueError(
            f"attach: {type(self.model).__name__} reads one image differently each time: it drops "
            "or shuffles patches at random, and its attention does not see which place each has. "
            "Attach to the model that reads whole images, such as ViTModel with these weights."
        )

    def prove_padding(self, whole_output: StackOutput, *, cached: bool) -> None:
        """Raise ValueError if a row that is padded next to a longer one computes something else
        than the same row by itself. Batches are padded on the right to train and on the left to
        generate, step by step, and a mask or a position that is shifted by the padding shows in no
        row that is read by itself.

        whole_output: the outcome of the example by itself. cached: True if the model returns a
        cache.
        """
        input_ids = self.example["input_ids"]
        batch, length = input_ids.shape
        short_arguments = self.shortened_example(length - NUM_MISSING_TOKENS)
        short_output = self.run_forward(short_arguments)
        pad_token = int(input_ids[0, 0])
        other_pad_token = int(input_ids[0, -1])
        for side in ("left", "right"):
            padded_arguments = self.padded_batch(short_arguments, side, pad_token)
            actual_in_words = f"next to padding on the {side}"
            if side == "left" and cached and not self.has_two_stacks:
                bounds = [0, length - NUM_MISSING_TOKENS, length]
                padded_outputs = {actual_in_words: self.read_in_steps(padded_arguments, bounds)}
                if (
                    static_output := self.read_through_static_cache(padded_arguments, bounds)
                ) is not None:
                    padded_outputs[f"{actual_in_words}, through a static cache,"] = static_output
            else:
                padded_outputs = {actual_in_words: self.run_forward(padded_arguments)}
            real_token_slice = slice(None)
            if not self.has_two_stacks:  # the rows of a decoder are as long as its own tokens
                real_token_slice = (
                    slice(NUM_MISSING_TOKENS, None)
                    if side == "left"
                    else slice(0, length - NUM_MISSING_TOKENS)
                )
            expected = short_output
            if side == "left" and not self.replaces_positions:
                # The model's own positions may count padding, but no token may read it.
                output_of_other_padding = self.run_forward(
                    self.padded_batch(short_arguments, side, other_pad_token)
                )
                expected = output_of_other_padding.select(slice(batch, None), real_token_slice)
                expected.positions = short_output.positions
            for actual_in_words, actual in padded_outputs.items():
                assert actual is not None
                self.compare(
                    actual_in_words, actual.select(slice(batch, None), real_token_slice), expected
                )
                if expected is short_output:
                    self.compare(actual_in_words, actual.select(slice(0, batch)), whole_output)

    def shortened_example(self, length: int) -> dict[str, Any]:
        """Return the example with its first `length` tokens: of the encoder, if there is one."""
        if self.has_two_stacks:
            return {**self.example, "input_ids": self.example["input_ids"][:, :length]}
        return self.arguments_for_tokens(self.example, 0, length)

    def padded_batch(
        self, short_arguments: dict[str, Any], side: str, pad_token: int
    ) -> dict[str, Any]:
        """Return the arguments for one batch: the example's rows, and below them the rows of
        `short_arguments`, padded to the same length.

        short_arguments: arguments for fewer tokens. side: "left" or "right". pad_token: id of the
        padding.
        """
        pad_sizes = (NUM_MISSING_TOKENS, 0) if side == "left" else (0, NUM_MISSING_TOKENS)
        batch: dict[str, Any] = {}
        for name, value in self.example.items():
            short_value = short_arguments[name]
            if short_value.shape != value.shape:
                short_value = F.pad(
                    short_value, pad_sizes, value=pad_token if name == "input_ids" else 0
                )
            row_dim = 1 if name == "position_ids" and short_value.ndim == 3 else 0
            batch[name] = torch.cat([value, short_value], dim=row_dim)
        unpadded_mask = torch.ones_like(self.example["input_ids"])
        padded_mask = F.pad(torch.ones_like(short_arguments["input_ids"]), pad_sizes)
        return {**batch, "attention_mask": torch.cat([unpadded_mask, padded_mask])}

    def arguments_for_tokens(
        self, arguments: dict[str, Any], first: int, last: int
    ) -> dict[str, Any]:
        """Return the arguments for the tokens from `first` to before `last` of the last stack; a
        mask keeps the tokens before them."""
        step_arguments = dict(arguments)
        for name in self.per_token_arguments:
            if name in step_arguments:
                token_dim = 1 if name == "inputs_embeds" else -1
                step_arguments[name] = step_arguments[name].narrow(token_dim, first, last - first)
        if "attention_mask" in step_arguments and not self.has_two_stacks:
            step_arguments["attention_mask"] = step_arguments["attention_mask"][:, :last]
        return step_arguments

    def read_in_steps(
        self,
        arguments: dict[str, Any],
        bounds: list[int],
        cache_argument: dict[str, Any] | None = None,
    ) -> StackOutput | None:
        """Read the tokens in steps through a cache, and return the joined outcome; None if the
        model returns no cache.

        bounds: where a step begins, and where the last one ends. cache_argument: {name: empty
        cache} to read through; None for the cache that the model makes itself."""
        if not forward_takes(self.model, "use_cache"):
            return None
        step_outputs: list[StackOutput] = []
        step_arguments: dict[str, Any] = {"use_cache": True, **(cache_argument or {})}
        for first, last in pairwise(bounds):
            if not step_arguments:
                return None
            step_outputs.append(
                self.run_forward(
                    {**self.arguments_for_tokens(arguments, first, last), **step_arguments}
                )
            )
            step_arguments = arguments_for_next_step(self.model, step_outputs[-1].model_output)
        positions_by_layer = zip(*(output.positions for output in step_outputs), strict=True)
        joined_positions = [
            torch.cat(layer_positions, dim=1) for layer_positions in positions_by_layer
        ]
        hidden = torch.cat([output.hidden_states for output in step_outputs], dim=1)
        return StackOutput(hidden, joined_positions, step_outputs[0].causal, None)

    def read_through_static_cache(
        self, arguments: dict[str, Any], bounds: list[int]
    ) -> StackOutput | None:
        """Read the tokens in steps through a static cache that has more places than they need, and
        return the joined outcome. bounds: as in `read_in_steps`.

        Return None if the model supports no static cache, or if a forward with one raises an error:
        such a model computes nothing wrong, and needs no refusal."""
        source_length = arguments["input_ids"].shape[1] if "input_ids" in arguments else 0
        cache_argument = static_cache_argument(
            self.model, bounds[-1] + NUM_MISSING_TOKENS, source_length
        )
        if not cache_argument:
            return None
        try:
            return self.read_in_steps(arguments, bounds, cache_argument)
        except _ForwardFailed:
            return None

    def run_forward(self, arguments: dict[str, Any]) -> StackOutput:
        """Return the outcome of one forward with these arguments. Raise ValueError if it fails."""
        outputs: list[Tensor] = []

        def record_output(module: nn.Module, args: tuple, out: Any) -> None:
            outputs.append(out if isinstance(out, Tensor) else out[0])

        handle = self.stack.register_forward_hook(record_output)
        try:
            with recorded_attention() as record:
                model_output = run_in_evaluation(self.model, arguments)
        except Exception as error:  # a family's code may raise anything
            arguments_in_words = ", ".join(arguments)
            raise self.error_naming_releases(
                f"fails with {arguments_in_words} ({one_line(error)})", _ForwardFailed
            ) from error
        finally:
            handle.remove()
        layers_and_calls = [(vars(call.module).get(LAYER_ATTRIBUTE), call) for call in record.calls]
        own_calls = [
            call for layer, call in layers_and_calls if layer and layer.stack is self.stack
        ]
        hidden = outputs[-1].float()
        positions = [self.positions_by_row(call.positions, hidden) for call in own_calls]
        return StackOutput(hidden, positions, all(call.causal for call in own_calls), model_output)

    def positions_by_row(self, positions: Tensor | range, hidden: Tensor) -> Tensor:
        """Return positions with an axis for the rows of the batch: (batch, len) or, with several
        components, (batch, len, axes)."""
        row_positions = as_tensor(positions, hidden.device)
        if row_positions.ndim == 1 + (self.num_axes > 1):
            row_positions = row_positions.expand(hidden.shape[0], *row_positions.shape)
        return row_positions.expand(hidden.shape[0], *row_positions.shape[1:])

    def compare(self, actual_in_words: str, actual: StackOutput, expected: StackOutput) -> None:
        """Raise ValueError if positions differ, or hidden states by more than rounding.

        actual_in_words: how `actual` was computed, for the message: "next to padding on the left".
        """
        for actual_positions, expected_positions in zip(
            actual.positions, expected.positions, strict=True
        ):
            if not torch.equal(actual_positions, expected_positions):
                raise self.error_naming_releases(
                    f"gets positions {actual_positions[0].tolist()} {actual_in_words}, and "
                    f"{expected_positions[0].tolist()} without"
                )
        if not self.compares_numbers:
            return
        largest = expected.hidden_states.abs().max()
        error = float((actual.hidden_states - expected.hidden_states).abs().max() / largest)
        if not error <= self.tolerance:
            raise self.error_naming_releases(
                f"computes something else {actual_in_words}: hidden states differ by {error:.1e} "
                f"of the largest, expected at most {self.tolerance:.0e}"
            )

    def error_naming_releases(
        self, problem: str, error_class: type[ValueError] = ValueError
    ) -> ValueError:
        """Return the error of class `error_class` for a problem such as "fails with input_ids",
        the end of a sentence about this model with this encoding; it names the installed
        releases."""
        encoding_name = type(getattr(self.stack, ENCODING_MODULE)).__name__
        installed_versions = versions("transformers", "torch")
        releases_in_words = ", ".join(
            f"{name} {version}" for name, version in installed_versions.items()
        )
        return error_class(
            f"attach: {type(self.model).__name__} with {encoding_name} {problem}. Either this "
            "model or the encoding cannot do that, or these releases do not fit together: "
            f"{releases_in_words}. check=False attaches it all the same, to read rows without "
            "padding in one pass."
        )
