"""Find a call in which a module's result depends on positions, and describe the module under
test."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from posenc.command_line.errors import one_line
from posenc.inspect.module.call_forms import (
    CALLS_BY_RETURN,
    NUM_HEADS,
    RETURNS_IN_WORDS,
    WIDTH,
    CallForm,
    Inputs,
    UnknownArguments,
    possible_forms,
)
from posenc.inspect.module.load import FunctionModule
from posenc.inspect.module.result_reader import (
    TOLERANCE,
    ResultReader,
    UnfitCall,
    reader_of_results,
)
from posenc.inspect.module.results import (
    absolute_difference,
    are_close,
    floating_tensors,
    position_axes,
    rows_by_position,
)

CheckResult = tuple[bool | None, str]
"""What a check returns: True if a property holds (None: it does not apply), and the measured
numbers in words."""


@dataclass(frozen=True)
class Caution:
    """What a check returns instead for a module that is right under a condition.

    note: the condition, in words, for the answer. measured: the measured numbers in words.
    """

    note: str
    measured: str


_MAX_LENGTH = 4096
"""Tokens of the longest sequence that the checks use; chosen, not derived."""
SLOW_SECONDS = 0.3
"""If a call takes more seconds, no longer sequence is tried."""
_MAX_NUMBERS = 2**23
"""Numbers of the largest bias that is tried, 64 MiB in float64; other results may have twice as
many."""
_STATED_NAMES = tuple(
    "max_position_embeddings max_positions max_seq_len max_seq_len_cached "
    "max_sequence_length max_seqlen max_length max_len num_positions num_embeddings".split()
)
_LENGTHS_TRIED = (7, 11, 13, 17)
"""Lengths of calls; the first two that are neither width nor heads are used, so that axes of
positions can be recognized by their size."""

ADAPTER_COMMAND = (
    r"printf 'import torch\ndef cos_sin(x, positions):\n a = positions[:, None] / 1e4 ** "
    r"(torch.arange(0, 64, 2) / 64)\n return a.cos(), a.sin()\n' > adapter.py && "
    "posenc inspect module adapter.py:cos_sin --as cos-sin"
)
"""A line that writes an adapter and inspects it."""


class ModuleMixesTokens(UnfitCall):
    """Raised for a module that computes the result of one token from other tokens."""


class ModuleCountsHeads(UnfitCall):
    """Raised for a module that takes the axis of heads of its input for that of positions."""


@dataclass(frozen=True)
class Refusal:
    """Hold the smallest number of tokens that the module refused, and the message of its error."""

    num_tokens: int
    message: str


@dataclass(frozen=True)
class Subject:
    """A module under test, and how it is called and read.

    module: one copy, for its attributes and docstrings.
    make_copy: makes an unused copy.
    as_word: the word of --as, such as "cos-sin".
    form: how it is called.
    reader: how its results are read.
    width, num_heads: channels of a token or head, and number of heads, of what it is given.
    length: number of tokens in the longest calls of the checks; the module takes as many.
    refusal: the first length that it refuses; None if it takes all that are tried.
    stated_positions: number of positions that it claims to have, or None.
    ignores_positions: True if the positions that it is given change nothing.
    constructor_arguments: as the user gave them.
    """

    module: nn.Module
    make_copy: Callable[[], nn.Module]
    as_word: str
    form: CallForm
    reader: ResultReader
    width: int = WIDTH
    num_heads: int = NUM_HEADS
    length: int = _MAX_LENGTH
    refusal: Refusal | None = None
    stated_positions: int | None = None
    ignores_positions: bool = False
    constructor_arguments: Mapping[str, Any] = field(default_factory=dict)

    def make_inputs(self, positions: Tensor | int, **fields: Any) -> Inputs:
        """Return the inputs of a call at these positions, or at 0 to positions - 1 for a number.

        fields: other fields of Inputs.
        """
        if isinstance(positions, int):
            positions = torch.arange(positions)
        fields = {"probe": self.reader.probe, **fields}
        return Inputs(positions, self.width, num_heads=self.num_heads, **fields)

    def read_result(
        self,
        inputs: Inputs,
        module: nn.Module | None = None,
        form: CallForm | None = None,
        row: int = 0,
    ) -> Tensor:
        """Return the module's result for these inputs as ResultReader.read reads it.

        module: the copy to call; None for an unused one. form: how to call it; None for
        `self.form`. row: of the batch.
        """
        returned = (form or self.form).call(self.make_copy() if module is None else module, inputs)
        return self.reader.read(returned, inputs.batch, row)


def modules_without_containers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and those inside it, without those that only hold others: FunctionModule,
    which wraps a plain function, and ModuleList."""
    container_types = FunctionModule | nn.ModuleList
    return (part for part in module.modules() if not isinstance(part, container_types))


def find_subject(
    make_copy: Callable[[], nn.Module],
    as_word: str,
    name: str = "",
    width: int = WIDTH,
    num_heads: int = NUM_HEADS,
    constructor_arguments: Mapping[str, Any] | None = None,
) -> Subject:
    """Return the module as a subject of checks, called in the first form of `as_word` in which its
    result depends on positions.

    make_copy: builds the module. as_word: the word of --as. name: of the module, for a message.
    constructor_arguments: what `make_copy` passes to the constructor.

    Raises: ValueError with what was tried and two ways out.
    """
    reason_by_call: dict[str, str] = {}
    module = make_copy()
    name = name or type(module).__name__
    try:
        for form in possible_forms(module, as_word):
            try:
                subject = _prove_subject(make_copy, as_word, form, width, num_heads)
            except (ModuleMixesTokens, ModuleCountsHeads) as unfit:
                reason_by_call = {form.call_in_words: str(unfit)}
                break
            except UnfitCall as unfit:
                reason_by_call[form.call_in_words] = str(unfit)
            except Exception as error:  # a call that does not fit may fail in any way
                reason_by_call.setdefault(form.call_in_words, one_line(error))
            else:
                subject = replace(subject, constructor_arguments=constructor_arguments or {})
                return subject if subject.ignores_positions else with_longest_length(subject)
    except UnknownArguments as unbound:
        reason = str(unbound)
    else:
        reason = f"--as {as_word} calls " + "; ".join(
            f"{call_in_words}: {reason_of_call}"
            for call_in_words, reason_of_call in reason_by_call.items()
        )
    other_words = ", ".join(word for word in CALLS_BY_RETURN if word != as_word)
    raise ValueError(
        f"{name} is not judged: {reason.rstrip('.')}. It must return "
        f"{RETURNS_IN_WORDS[as_word]}; --as may be {other_words} too, --width and "
        f"--heads are {width} and {num_heads}. Or write an adapter that is "
        f"called so and calls yours, as this line does: {ADAPTER_COMMAND}"
    )


def _prove_subject(
    make_copy: Callable[[], nn.Module], as_word: str, form: CallForm, width: int, num_heads: int
) -> Subject:
    """Return the module as a subject of checks, called in this form, if it can be judged so.

    Called with few and with many positions it must return tensors of floating point with an axis of
    positions, no NaN, and the same for the same input; and positions must change what it returns.

    make_copy: builds the module. as_word: what --as says that it returns. form: how it is called.
    Raises: UnfitCall, with the first of these that fails.
    """
    few_tokens, many_tokens, *_ = (n for n in _LENGTHS_TRIED if n not in (width, num_heads))

    def run(inputs: Inputs) -> Any:
        return form.call(make_copy(), replace(inputs, num_heads=num_heads))

    axes = _find_position_axes(run, width, (few_tokens, many_tokens))

    def tensors_of_call(**changes: Any) -> list[Tensor]:
        """Return the tensors with an axis of positions, of a call with `changes` of its inputs."""
        parts = floating_tensors(run(replace(Inputs(torch.arange(many_tokens), width), **changes)))
        return [part for part, part_axes in zip(parts, axes, strict=True) if part_axes]

    plain_results = tensors_of_call()
    _refuse_random_results(plain_results, tensors_of_call)
    axes_seen = [part_axes for part_axes in axes if part_axes]
    _refuse_mixing_tokens(form, plain_results, axes_seen, tensors_of_call, many_tokens)
    if not _depends_on_place(plain_results, axes_seen):
        _refuse_counting_heads(form, plain_results)
        raise UnfitCall(
            f"no position reaches what it returns for {many_tokens} tokens: equal tokens get equal "
            "rows"
        )
    ignores_positions = False
    if form.takes_positions:
        results_of_spread = tensors_of_call(positions=2 * torch.arange(many_tokens))
        ignores_positions = not any(
            _differ(a, b) for a, b in zip(results_of_spread, plain_results, strict=True)
        )
    reader = reader_of_results(run, as_word, form, width, axes)
    module = make_copy()
    stated_limit = stated_max_positions(module)
    return Subject(
        module,
        make_copy,
        as_word,
        form,
        reader,
        width,
        num_heads,
        stated_positions=stated_limit,
        ignores_positions=ignores_positions,
    )


def _find_position_axes(
    run: Callable[[Inputs], Any], width: int, counts: tuple[int, int]
) -> list[tuple[int, ...]]:
    """Return the axes of positions of each tensor that the module returns: those whose size follows
    the number of positions in two calls, of counts[0] and counts[1] positions.

    Raises: UnfitCall if there is no such axis.
    """
    short_parts, long_parts = (
        floating_tensors(run(Inputs(torch.arange(count), width))) for count in counts
    )
    if len(short_parts) != len(long_parts) or not long_parts:
        raise UnfitCall("returns no tensor of floating point")
    axes = [position_axes(a, b, counts) for a, b in zip(short_parts, long_parts, strict=True)]
    if not any(axes):
        raise UnfitCall("returns nothing with an axis of positions")
    return axes


def _refuse_random_results(
    plain_results: list[Tensor], tensors_of_call: Callable[[], list[Tensor]]
) -> None:
    """Raise UnfitCall for NaN in `plain_results`, or if `tensors_of_call`, which repeats the call,
    returns other results."""
    if any(part.isnan().any() for part in plain_results):
        raise UnfitCall("returns NaN")
    if any(not torch.equal(a, b) for a, b in zip(plain_results, tensors_of_call(), strict=True)):
        raise UnfitCall(
            "gives another result for the same call: it is random, or keeps count outside"
        )


def _depends_on_place(tensors: list[Tensor], axes: list[tuple[int, ...]]) -> bool:
    """Return True if equal tokens get different results at different places.

    axes: the axes of positions of each of `tensors`.
    """
    for tensor, part_axes in zip(tensors, axes, strict=True):
        if any(_differ(tensor.roll(1, axis), tensor) for axis in part_axes):
            return True
    return False


def _refuse_mixing_tokens(
    form: CallForm,
    plain_results: list[Tensor],
    axes: list[tuple[int, ...]],
    tensors_of_call: Any,
    count: int,
) -> None:
    """Raise ModuleMixesTokens for a layer in which the row of one token depends on another token.

    plain_results: the results of a call. axes: their axes of positions. tensors_of_call: repeats
    the call with another content of `changed_token`. count: its number of tokens.
    """
    if not form.words & {"x", "q", "k"}:
        return
    for changed_token in (0, count - 1):
        other_tokens = [i for i in range(count) if i != changed_token]
        for before, after, part_axes in zip(
            plain_results, tensors_of_call(changed_token=changed_token), axes, strict=True
        ):
            if len(part_axes) != 1:
                continue
            rows_before = rows_by_position(before, part_axes[0])[other_tokens]
            rows_after = rows_by_position(after, part_axes[0])[other_tokens]
            if _differ(rows_before, rows_after):
                largest_move = absolute_difference(rows_before, rows_after).max().item()
                raise ModuleMixesTokens(
                    f"another content of token {changed_token} moves other tokens' rows by "
                    f"{largest_move:.2g}: a layer that reads the sequence, and no position module"
                )


def _refuse_counting_heads(form: CallForm, plain_results: list[Tensor]) -> None:
    """Raise ModuleCountsHeads if equal heads get different rows in `plain_results`."""
    if form.content_shape != "bhnw" or not form.words & {"x", "q", "k"}:
        return
    for part in plain_results:
        if part.ndim == 4 and _differ(part.roll(1, 1), part):
            raise ModuleCountsHeads(
                "equal tokens get equal rows, and equal heads do not: it takes the heads for "
                "tokens. If it is made for (batch, tokens, heads, width), transpose in an adapter"
            )


def _differ(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b differ by more than the rounding of one call, 1e-6 of the largest
    magnitude."""
    return not are_close(a, b, TOLERANCE / 100)


def stated_max_positions(module: nn.Module) -> int | None:
    """Return the number of positions that a module, one inside it or its config states; None if
    none does. An nn.Embedding states the number of its rows.

    Modules that are judged take no token ids, so an nn.Embedding is taken for a table of positions.
    A table of something else that comes first, such as of token types, is mistaken for it. T5's
    table of relative positions has fewer rows than there are distances; for a bias this number only
    says where a far row of a batch begins, and that is never before the end of `Subject.length`.
    """
    for part in modules_without_containers(module):
        claimed = getattr(getattr(part, "claims", None), "max_positions", None)
        if claimed is not None:
            return claimed
        config = getattr(part, "config", None)
        for name, holder in itertools.product(_STATED_NAMES, (config, part)):
            value = getattr(holder, name, None)
            is_flag = isinstance(value, bool)  # True is an int, too
            if isinstance(value, int) and not is_flag and value > 0:
                return value
    return None


def with_longest_length(subject: Subject) -> Subject:
    """Return the subject with `length` set to the longest power of two that it runs in reasonable
    time, up to _MAX_LENGTH. If it refuses one of these, `length` is the longest that it takes, and
    `refusal` is set."""
    num_accepted = 11  # `_prove_subject` has called it with as many at least
    for count in (2**i for i in range(4, _MAX_LENGTH.bit_length())):  # 16, 32, ..., _MAX_LENGTH
        start = time.perf_counter()
        error_message = _error_of_call(subject, count)
        if error_message is not None:
            return _with_refusal_between(subject, num_accepted, count, error_message)
        num_accepted = count
        num_numbers = subject.read_result(subject.make_inputs(count)).numel()
        is_bias = subject.reader.kind == "bias"
        max_numbers = _MAX_NUMBERS if is_bias else 2 * _MAX_NUMBERS
        if (
            time.perf_counter() - start > SLOW_SECONDS
            or num_numbers * (4 if is_bias else 2) > max_numbers
        ):
            break
    return replace(subject, length=num_accepted)


def _with_refusal_between(
    subject: Subject, num_accepted: int, num_refused: int, error_message: str
) -> Subject:
    """Return the subject with its `length` and `refusal`, found by bisection.

    num_accepted: a number of tokens that the module takes. num_refused: a larger one that it
    refuses, with the message `error_message`.
    """
    while num_refused - num_accepted > 1:
        middle = (num_accepted + num_refused) // 2
        message_at_middle = _error_of_call(subject, middle)
        if message_at_middle is None:
            num_accepted = middle
        else:
            num_refused = middle
            error_message = message_at_middle
    return replace(subject, length=num_accepted, refusal=Refusal(num_refused, error_message))


def _error_of_call(subject: Subject, count: int) -> str | None:
    """Return the message of the error with which a call of `count` tokens ends; None if the call
    returns."""
    try:
        subject.read_result(subject.make_inputs(count))
    except Exception as error:  # foreign code: any exception is its limit
        return one_line(error)
    return None
