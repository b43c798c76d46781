"""What every encoding is held to. One function per property, each taking `make(shape)`, so that the
contract tests and their negative controls run the same code."""

import inspect

from tests.checks import claims, modules, numbers, sequences, tracing

CHECKS = {
    name.removeprefix("assert_"): function
    for module in (numbers, claims, sequences, modules)
    for name, function in vars(module).items()
    if name.startswith("assert_")
    and function.__module__ == module.__name__
    and len(inspect.signature(function).parameters) == 1
}
"""The checks that take milliseconds, by name."""

__all__ = ["CHECKS", "claims", "modules", "numbers", "sequences", "tracing"]
