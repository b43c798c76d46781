"""Collect all checks of an encoding, its contract, by name; run them; make them tests for pytest.

Each check takes a function that builds the encoding. The checks of torch.compile and torch.export,
which take seconds, are defined here.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posenc.encodings import ModelShape, PositionEncoding, create, line_in_user_code
from posenc.testing import claims, modules, numerics, sequences
from posenc.testing.harness import (
    Make,
    OneLayerModel,
    assert_same,
    build_example,
    build_layer,
    possible_length,
    random_embeddings,
    successive_positions,
)

VOIDING_FAILURES = {
    "outputs_are_finite": "its results are not finite",
    "gradients_are_finite": "its gradients are not finite",
    "inputs_are_not_written_to": "it changes its inputs in place",
    "earlier_calls_leave_no_trace": "its results depend on earlier calls",
    "the_future_is_invisible": "a query sees later tokens",
    "decoding_matches_prefill": "its results depend on how a sequence is cut into calls",
    "rows_are_independent": "its results depend on other rows of the batch",
}
"""Checks whose failure makes the results of a comparison meaningless, and what that failure
means."""


def in_both_modes(check: Callable[[Make], None]) -> Callable[[Make], None]:
    """Return a check that runs `check` with the encoding in training mode and again after `eval()`:
    some encodings act in evaluation only, as Qwen's factors of log n do."""

    @functools.wraps(check)
    def checked(make: Make) -> None:
        """Run the check in both modes. A failure of the second one begins with "after eval()", but
        for an assertion in the user's own code, which stays as it is."""
        check(make)
        try:
            check(lambda shape: make(shape).eval())
        except AssertionError as error:
            if line_in_user_code(error):  # the user's own assertion, which names its line
                raise
            raise AssertionError(f"after eval(): {error}") from error

    return checked


def assert_compiles_without_recompiling_per_length(make: Make) -> None:
    """Check that one compiled graph, and a second one from the first other length on, serve all
    lengths."""
    model = build_layer(make)
    encoding = model.encoding
    lengths = sorted({possible_length(encoding, n) for n in (7, 12, 19, 31)})
    torch.compiler.reset()
    num_graphs = 0

    def run_as_traced(graph: torch.fx.GraphModule, _examples: list[Tensor]) -> Callable[..., Any]:
        """Compile nothing: a backend that only counts the graphs that it is given."""
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=run_as_traced)
    for length in lengths:
        x = random_embeddings(length)
        positions = successive_positions(encoding, length)
        assert_same(compiled(x, positions), model(x, positions), f"length {length}")
    assert num_graphs <= 2, f"{num_graphs} graphs for lengths {lengths}"


def export_layer(
    model: OneLayerModel, x: Tensor, positions: Tensor, max_length: int, strict: bool
) -> Callable[..., Tensor]:
    """Export a layer for sequences of 2 to `max_length` tokens. Return the exported program, a
    function of x and positions.

    model: a layer with a fixed implementation of attention, because "auto" would specialise the
    program to one length.
    x, positions: an example of its inputs.
    strict: True: compile the layer's code; False: run it on fake tensors.
    """
    any_length = torch.export.Dim("length", min=2, max=max_length)
    shapes = ({1: any_length}, {0: any_length})
    program = torch.export.export(model, (x, positions), dynamic_shapes=shapes, strict=strict)
    return program.module()


def assert_exports_with_any_length(make: Make, strict: bool | None = None) -> None:
    """Check that an exported program gives the layer's results for fewer and for more tokens than
    it was exported with.

    strict: as in `export_layer`. None: True, or False where this version of torch cannot compile
    the code.
    """
    from torch._dynamo.exc import Unsupported  # takes seconds, which commands need not pay

    model, x, positions = build_example(make, 12)
    encoding = model.encoding
    model.attention.impl = "reference"
    # 4096 is any number above the lengths that are tried.
    export_arguments = model.eval(), x, positions, possible_length(encoding, 4096)
    try:
        program = export_layer(*export_arguments, strict=strict is not False)
    except Unsupported:
        if strict:
            raise
        program = export_layer(*export_arguments, strict=False)
    for n in (possible_length(encoding, 5), possible_length(encoding, 31)):
        x = random_embeddings(n)
        positions = successive_positions(encoding, n)
        assert_same(program(x, positions), model(x, positions), f"length {n}")


def _quick_checks() -> Iterator[tuple[str, Callable[[Make], None]]]:
    """Yield the name and the function of each check that takes milliseconds."""
    for module in (numerics, claims, sequences, modules):
        for full_name, function in vars(module).items():
            # Only asserts of the module itself that need no argument but the builder.
            is_check = full_name.startswith("assert_") and function.__module__ == module.__name__
            if not is_check or len(inspect.signature(function).parameters) != 1:
                continue
            name = full_name.removeprefix("assert_")
            if module is sequences or name in VOIDING_FAILURES:
                function = in_both_modes(function)
            yield name, function


CHECKS: dict[str, Callable[[Make], None]] = dict(_quick_checks())
"""The checks that take milliseconds, by name."""

SLOW_CHECKS: dict[str, Callable[[Make], None]] = {
    "compiles_without_recompiling_per_length": assert_compiles_without_recompiling_per_length,
    "exports_with_any_length": assert_exports_with_any_length,
}
"""The checks that take seconds, by name."""

HARMLESS_OPTIONS = {
    "every": "decides which layers of RNoPE rotate; layer 0, which is checked, always does",
    "num_positions": "limits CoPE's count of open gates, which is smaller at the checked length",
    "init_std": "changes initial values, which a checkpoint replaces",
}
"""Numeric options that may leave the result unchanged, and why."""


@dataclass(frozen=True)
class Verdict:
    """Hold the result of a check."""

    check: str
    """Name of the check, a key of CHECKS or of the result of `every_check`."""
    failure: str | None
    """Why the encoding fails, in one line; None if it passes."""
    raised: bool = False
    """True if the encoding raised an error, so that the check could not look for what it checks."""


def every_check(harmless: Collection[str] = ()) -> dict[str, Callable[[Make], None]]:
    """Return all checks by name, quick and slow ones. harmless: names of numeric options that may
    leave the result unchanged, in addition to HARMLESS_OPTIONS."""
    check_of_options = functools.partial(
        modules.assert_no_option_is_ignored, harmless=frozenset({*HARMLESS_OPTIONS, *harmless})
    )
    return {**CHECKS, "no_option_is_ignored": check_of_options, **SLOW_CHECKS}


def maker(encoding: type[PositionEncoding] | str, **options: Any) -> Make:
    """Return a function of a ModelShape that builds the encoding for it.

    encoding: a class, or a text for `posenc.create`. options: constructor arguments in addition to
    those from the shape.
    """

    def make(shape: ModelShape, **more: Any) -> PositionEncoding:
        """Build the encoding for a shape. more: constructor arguments that replace those of
        `maker`."""
        if isinstance(encoding, str):
            return create(encoding, shape, **{**options, **more})
        return encoding.from_shape(shape, **{**options, **more})

    return make


def verdicts(make: Make, checks: dict[str, Callable[[Make], None]]) -> Iterator[Verdict]:
    """Yield the result of each check. An encoding that raises an error fails the check.

    Raises: ValueError under `python -O`, which removes assertions.
    """
    if not __debug__:
        raise ValueError("The contract needs assertions: run Python without -O.")
    for name, check in checks.items():
        yield Verdict(name, *_run_check(check, make))


def _run_check(check: Callable[[Make], None], make: Make) -> tuple[str | None, bool]:
    """Run a check. Return two fields of its `Verdict`: the failure, and whether it raised."""
    try:
        check(make)
    except (Exception, SystemExit) as error:  # a user's encoding may raise anything
        user_line = line_in_user_code(error)
        message = " ".join(str(error).split())[:300]  # one line of a table
        if isinstance(error, AssertionError) and not user_line:  # of the check
            return message or "fails", False
        reason = f"{type(error).__name__}: {message}".rstrip(" .:")
        return f"{reason}, at {user_line}" if user_line else reason, True
    return None, False


def test_contract(
    *encodings: type[PositionEncoding] | str, harmless: Collection[str] = (), **options: Any
) -> Callable[..., None]:
    """Return the whole contract as a test function for pytest, with a case for each encoding and
    check.

    In a test file of your own:

        from my_package import MyEncoding
        from posenc import testing

        test_my_encoding = testing.test_contract(MyEncoding, slope=2.0)

    Args:
        encodings: classes, or texts for `posenc.create`.
        harmless: names of numeric options that may leave the result unchanged.
        options: constructor arguments in addition to those from the model's shape.

    Raises: TypeError for anything but classes and texts; ValueError for a text that names no
    encoding.
    """
    import pytest  # not above: posenc.testing runs without it

    if not encodings:
        raise TypeError("test_contract: give at least one encoding.")
    subjects = {}
    for encoding in encodings:
        if isinstance(encoding, str):
            subjects[encoding] = maker(encoding, **options)
        elif isinstance(encoding, type) and issubclass(encoding, PositionEncoding):
            subjects[encoding.__name__] = maker(encoding, **options)
        else:
            raise TypeError(
                f"test_contract: expected subclasses of posenc.PositionEncoding, got {encoding!r}."
            )
    checks = every_check(harmless)

    @pytest.mark.parametrize("check", checks)
    @pytest.mark.parametrize("encoding", subjects)
    def contract(encoding: str, check: str) -> None:
        """Run one check with one encoding."""
        checks[check](subjects[encoding])

    return contract


test_contract.__test__ = False  # type: ignore[attr-defined]  # it makes tests and is none
