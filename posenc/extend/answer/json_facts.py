"""The numbers of an outcome, by the names that programs read."""

import itertools
from typing import Any

from posenc.extend.extension import Outcome
from posenc.extend.measure.evaluation import Evaluation


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """Return all that was measured, recommended and written, by the keys of --json. Losses are in
    nats per token. A number that could not be measured is NaN, as for a learned table all positions
    beyond its last row."""
    short = outcome.short_text_rises()
    measured = {}
    for name, evaluation in outcome.evaluations().items():
        variant = outcome.measured[name][0] if name in outcome.measured else None
        measured[name] = {
            "summary": variant.summary if variant else "",
            "stock_tools_load_it": variant is None or not variant.needs_special_runtime,
            "cache_is_exact": variant is None or variant.cache_safe,
            **_facts_of_evaluation(evaluation, outcome),
            "short_text_rise": short.get(name),
        }
    return {
        "folder": str(outcome.checkpoint.folder),
        "trained_length": outcome.checkpoint.trained_length,
        "target_length": outcome.target,
        "measured": measured,
        "not_measured": outcome.not_measured,
        "recommended": outcome.recommended or None,
        "reason": outcome.reason,
        "tuning_losses": outcome.tuning_losses,
        "config_changes": outcome.config_diff,
        "left_behind": outcome.files_not_copied,
        "proof": outcome.proof,
    }


def _facts_of_evaluation(evaluation: Evaluation, outcome: Outcome) -> dict[str, Any]:
    """Return the measurements of one method as plain lists and dicts."""
    buckets = itertools.pairwise(evaluation.edges)
    return {
        "by_position": [
            {"from": low, "to": high, **vars(e)}
            for (low, high), e in zip(buckets, evaluation.by_position, strict=True)
        ],
        "by_context": [
            {"context": context, **vars(e)} for context, e in evaluation.by_context.items()
        ],
        "passkey": [
            {"length": length, "depth": depth, "right": share}
            for (length, depth), share in evaluation.passkey.items()
        ],
        "tasks": [
            {
                "task": task,
                "length": length,
                "counts": outcome.score_is_meaningful(task, length),
                "exact": score.exact,
                "loss": score.loss,
                "by_depth": [
                    {"depth": depth, **cell._asdict()} for depth, cell in score.by_depth.items()
                ],
            }
            for (task, length), score in evaluation.tasks.items()
        ],
        "tasks_left_out": [
            {"task": task, "length": length, "why": why}
            for (task, length), why in evaluation.tasks_left_out.items()
        ],
        "attention_entropy": list(evaluation.entropy),
        "seconds": evaluation.seconds,
    }
