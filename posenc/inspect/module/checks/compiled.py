"""Check that torch.compile reuses one graph for sequences of other lengths."""

import logging
import warnings
from typing import Any

import torch

from posenc.inspect.module.subject import Measured, Subject
from posenc.report.page.failure import one_line

LENGTHS = (16, 24, 40, 56, 72, 88)


def one_graph(subject: Subject) -> Measured:
    """Count the graphs for sequences of growing length; the second one must work for any length."""
    lengths = [n for n in LENGTHS if n <= subject.length]
    if len(lengths) < len(LENGTHS):
        return None, f"does {subject.length} tokens only"
    graphs = 0

    def count(module: torch.fx.GraphModule, example: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    counts = []
    module = subject.fresh()
    torch._dynamo.reset()
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)  # graph breaks of others are no news on stderr
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled = torch.compile(module, backend=count)
        try:
            for length in lengths:
                before = graphs
                ordered, named = subject.form.arguments(subject.inputs(length))
                compiled(*ordered, **named)
                counts.append(graphs - before)
        except Exception as failed:  # the tracers have classes of their own for what they lack
            return None, f"does not compile: {one_line(failed)}"
        finally:
            logger.setLevel(level)
            torch._dynamo.reset()
    text = f"{sum(counts)} graphs for {len(lengths)} lengths"
    return not (counts[-1] and counts[-2]), text
