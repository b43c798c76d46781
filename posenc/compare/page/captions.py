"""What to see in a figure of a study, in one sentence computed from its numbers."""

import math

from posenc.compare.judge.summary import (
    REACH_TOLERANCE,
    bits_saved_by_doubling,
    context_gains,
    mean_at,
)
from posenc.compare.results import Study
from posenc.sentence import join_clauses, join_names


def caption_by_length(study: Study) -> str:
    """Name the encodings whose loss stays up to the longest length."""
    train = study.trials[0].train_length
    longest = max(study.trials[0].test_lengths)
    cannot = [r.encoding for r in study.summary if mean_at(r.by_length, longest) == math.inf]
    stays_low = [row.encoding for row in study.summary if row.reach == longest]
    parts = []
    if stays_low:
        within = 100 * (REACH_TOLERANCE - 1)
        parts.append(
            f"up to {longest:,} bytes the loss of {join_names(stays_low)} stays within "
            f"{within:.0f} % of that at {train:,}"
        )
    if cannot:
        parts.append(f"{join_names(cannot)} cannot run there")
    return join_clauses(parts) if parts else ""


def caption_by_context(study: Study) -> str:
    """Name the encodings that gain from context beyond the training length in every seed."""
    gains = {r.encoding: context_gains(study, r.encoding) for r in study.summary}
    measured = {name: of_seeds[1] for name, of_seeds in gains.items() if of_seeds is not None}
    falls = [name for name, of_seeds in measured.items() if all(g > 0 for g in of_seeds)]
    if not measured:
        return "No encoding here was given more context than in training."
    if falls:
        return join_clauses([f"better from more context than in training: {join_names(falls)}"])
    return join_clauses(["no encoding here gets better from more context than in training"])


def caption_training(study: Study) -> str:
    """Say how much the losses still fall."""
    fell = bits_saved_by_doubling(study)
    if not fell:
        return "The training was too short to estimate how much the loss still falls."
    least = min(fell, key=fell.__getitem__)
    most = max(fell, key=fell.__getitem__)
    return (
        f"A doubling of the steps (estimated) lowered the loss of {most} most, by "
        f"{fell[most]:.2f} bits, and that of {least} least, by {fell[least]:.2f}."
    )
