"""Convert an outcome to JSON: plain numbers, strings, lists and dicts."""

import dataclasses
import itertools
import math
from typing import Any

from posenc.extend.extension import Outcome
from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.measure.intervals import Estimate


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return all that was measured, recommended and written. Losses are in nats per token. A number
    that could not be measured is null: of a learned table, all beyond its last row."""
    short = outcome.short_text()
    measured = {}
    for name, evaluation in outcome.evaluations().items():
        variant = outcome.measured[name][0] if name in outcome.measured else None
        measured[name] = {
            "summary": variant.summary if variant else "",
            "stock_tools_load_it": variant is None or not variant.needs_runtime,
            "cache_is_exact": variant is None or variant.cache_safe,
            **_evaluation(evaluation, outcome),
            "short_text_rise": _estimate(short[name]) if name in short else None,
        }
    found = {
        "folder": str(outcome.checkpoint.folder),
        "trained_length": outcome.checkpoint.trained_length,
        "target_length": outcome.target,
        "measured": measured,
        "not_measured": outcome.failed,
        "recommended": outcome.recommended or None,
        "reason": outcome.reason,
        "tuning_losses": outcome.tuning_losses,
        "config_changes": outcome.config_diff,
        "proof": outcome.proof and dataclasses.asdict(outcome.proof),
    }
    return _finite(found)


def _evaluation(found: Evaluation, outcome: Outcome) -> dict[str, Any]:
    buckets = itertools.pairwise(found.edges)
    return {
        "by_position": [
            {"from": low, "to": high, **_estimate(e)}
            for (low, high), e in zip(buckets, found.by_position, strict=True)
        ],
        "by_context": [
            {"context": context, **_estimate(e)} for context, e in found.by_context.items()
        ],
        "passkey": [
            {"length": length, "depth": depth, "right": share}
            for (length, depth), share in found.passkey.items()
        ],
        "tasks": [
            {
                "task": task,
                "length": length,
                "counts": outcome.counts(task, length),
                "exact": _estimate(score.exact),
                "loss": _estimate(score.loss),
                "by_depth": [
                    {"depth": depth, **cell._asdict()} for depth, cell in score.by_depth.items()
                ],
            }
            for (task, length), score in found.tasks.items()
        ],
        "tasks_left_out": [
            {"task": task, "length": length, "why": why}
            for (task, length), why in found.left_out.items()
        ],
        "attention_entropy": list(found.entropy),
        "seconds": found.seconds,
    }


def _estimate(e: Estimate) -> dict[str, Any]:
    return dataclasses.asdict(e)


def _finite(found: Any) -> Any:
    """Replace numbers that are not finite by None: JSON has neither NaN nor infinity."""
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
