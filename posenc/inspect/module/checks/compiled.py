"""Check that torch.compile reuses one graph for sequences of other lengths."""

import logging
import warnings
from typing import Any

import torch

from posenc.command_line.errors import one_line
from posenc.inspect.module.subject import CheckResult, Subject

_LENGTHS = (16, 24, 40, 56, 72, 88)
"""Lengths of the calls of one compiled module; chosen, not derived, none of them 0 or 1, for which
torch always makes graphs of their own."""


def judge_compiled_graphs(subject: Subject) -> CheckResult:
    """Check that the last two of six growing lengths need no new graph of torch.compile."""
    lengths = [n for n in _LENGTHS if n <= subject.length]
    if len(lengths) < len(_LENGTHS):
        return None, f"does {subject.length} tokens only"
    graphs = 0

    def count_graph(module: torch.fx.GraphModule, example: Any) -> Any:
        """Count a graph as a backend of torch.compile, and run it as it is."""
        nonlocal graphs
        graphs += 1
        return module.forward

    counts = []
    module = subject.make_copy()
    torch._dynamo.reset()  # graphs of other modules would count for the limit of recompiling
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)  # graph breaks of others are no news on stderr
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled = torch.compile(module, backend=count_graph)
        try:
            for length in lengths:
                before = graphs
                ordered, named = subject.form.arguments(subject.make_inputs(length))
                compiled(*ordered, **named)
                counts.append(graphs - before)
        except Exception as failed:  # the tracers have classes of their own for what they lack
            return None, f"does not compile: {one_line(failed)}"
        finally:
            logger.setLevel(level)
            torch._dynamo.reset()
    text = f"{sum(counts)} graphs for {len(lengths)} lengths"
    return not (counts[-1] and counts[-2]), text
