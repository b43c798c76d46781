"""A runtime that computes something else or refuses the file, where no other rule says why."""

import re
from collections.abc import Iterable, Iterator, Sequence

from posenc.doctor.misreadings import TOLERANCE, Case
from posenc.doctor.rule import RULES_BY_CODE, Finding, Hit, rule
from posenc.frequencies import float64_formulas
from posenc.report.report import join_names
from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation
from posenc.runtimes.config_model import language_model_key
from posenc.runtimes.disagreement import Difference, differences

ROPE_DICTS = ("rope_scaling", "rope_parameters")
KEYS_OF_ASPECT = {
    "layers": ("layer_types", "no_rope_layers", "no_rope_layer_interval"),
    "pairs": ("head_dim", "partial_rotary_factor", "rotary_dim", "rotary_pct", *ROPE_DICTS),
    "frequencies": ("rope_theta", "rotary_emb_base", "rope_local_base_freq", *ROPE_DICTS),
    "multiplier": ROPE_DICTS,
    "scale": ("head_dim", "query_pre_attn_scalar", "attention_multiplier", *ROPE_DICTS),
}
"""Aspect -> the keys of a config that decide it."""


@rule("PD038", "E")
def report_difference_left_unexplained(case: Case) -> Iterator[Hit]:
    """Report nothing itself: a difference that no other rule explains is found by
    `unexplained_findings`."""
    yield from ()  # `unexplained_findings` makes these, when the findings of all rules are known


@rule("PD039", "E")
def report_refusal_left_unexplained(case: Case) -> Iterator[Hit]:
    """Report nothing itself: a refusal that no other rule explains is found by
    `unexplained_findings`."""
    yield from ()  # `unexplained_findings` makes these, when the findings of all rules are known


def unexplained_findings(case: Case, explained_runtimes: Iterable[str]) -> list[Finding]:
    """Return a finding for each named runtime that differs or refuses, and that no other finding
    explains.

    explained_runtimes: the runtimes that other findings name.
    """
    findings: list[Finding] = []
    for runtime in case.judged_runtimes:
        if runtime not in explained_runtimes and case.differences[runtime]:
            refuses = bool(case.computed[runtime].error)
            findings.append(
                _finding_of_refusal(case, runtime)
                if refuses
                else _finding_of_difference(case, runtime)
            )
    return findings


def _finding_of_refusal(case: Case, runtime: str) -> Finding:
    """Return a finding of PD039: with which words a runtime refuses the file, or which keys it
    misses. A warning where the missing keys are not about positions."""
    computed = case.computed[runtime]
    where = f"{runtime}'s {computed.read}" if computed.read else runtime
    # mlx-lm stops for any missing key; what is not about positions may be a part of a config.
    severity = RULES_BY_CODE["PD039"].severity if "error" in case.differences[runtime] else "W"
    error = computed.error or ""
    message = f"{runtime} refuses the file: {error}"
    missing_keys = _missing_keys(error)
    if missing_keys:
        key_of_language_model = language_model_key(case.source.config)
        place = f"into {key_of_language_model}" if key_of_language_model else "at the top level"
        cure = (
            f"Write {join_names(missing_keys)} {place}, which {where} needs, or use another "
            "runtime."
        )
        if "positional argument" in error:  # Python's words about a constructor say less
            message = f"{runtime} refuses the file, which does not state {join_names(missing_keys)}"
    else:
        cure = (
            f"Change the value or the key that its error names, which is raised around {where}, or "
            "use another runtime."
        )
    return Finding("PD039", severity, message, (runtime,), cure)


def _missing_keys(error: str) -> list[str]:
    """Return the keys of a config that an error says are missing, in quotes; empty for another
    error."""
    if not re.search(r"\bmissing\b|^KeyError", error):
        return []
    return [f'"{key}"' for key in re.findall(r"'(\w+)'", error)]


def _finding_of_difference(case: Case, runtime: str) -> Finding:
    """Return a finding of PD038: what a runtime computes instead of what is meant, and which keys
    or which place in its code decide it.

    The runtime must differ in an aspect and must not refuse the file; the meaning must be clear.
    """
    computed = case.computed[runtime]
    where = f"{runtime}'s {computed.read}" if computed.read else runtime
    scaling_left_out = _scaling_left_out(case, computed)
    if scaling_left_out:
        return Finding(
            "PD038",
            RULES_BY_CODE["PD038"].severity,
            f"{runtime} leaves out {scaling_left_out} and computes plain RoPE",
            (runtime,),
            f"{where} does not read it. `--fix --out NEW` looks for a spelling that it reads. "
            "Where there is none, use another runtime for texts beyond the trained length.",
        )
    aspect, what_it_does = _first_difference_in_words(case, computed)
    stated_keys = [key for key in KEYS_OF_ASPECT[aspect] if case.config.get(key) is not None]
    keys_in_words = (
        join_names(stated_keys)
        if stated_keys
        else f"the defaults for {join_names(KEYS_OF_ASPECT[aspect])}"
    )
    return Finding(
        "PD038",
        RULES_BY_CODE["PD038"].severity,
        f"{runtime} {what_it_does}",
        (runtime,),
        f"If {runtime} is right, change {keys_in_words}, by which this file was read. If the file "
        f"is right, {where} does not read it: `--fix --out NEW` looks for a spelling that it "
        "reads.",
    )


def _scaling_left_out(case: Case, computed: ComputedPositions) -> str:
    """Return the scaling that a runtime leaves out, in words: it rotates a kind of layer by the
    base alone, of which the file means a scaling. Empty where it computes something else."""
    assert case.meaning is not None
    for kind, rope_dict in case.meaning.parameters.items():
        rotations = computed.rotations_of_kind(kind)
        if rope_dict["rope_type"] == "default" or not rotations:
            continue
        rotation = rotations[0]
        if rotation.multiplier != 1:
            continue
        rotary_dim = 2 * len(rotation.inv_freq)
        if _nearly_equal(
            rotation, float64_formulas.unscaled_frequencies(rotary_dim, rope_dict["rope_theta"])
        ):
            of_kind = "" if kind == "all" else f" of {kind}"
            with_factor = (
                f" with factor {rope_dict['factor']:g}"
                if isinstance(rope_dict.get("factor"), int | float)
                else ""
            )
            return f"the scaling{of_kind}, {rope_dict['rope_type']}{with_factor},"
    return ""


def _nearly_equal(rotation: LayerRotation, inv_freq: Sequence[float]) -> bool:
    """Return True if a rotation has these frequencies, but for rounding."""
    return all(
        abs(computed - expected) <= TOLERANCE.of_frequencies * expected
        for computed, expected in zip(rotation.inv_freq, inv_freq, strict=True)
    )


def _first_difference_in_words(case: Case, computed: ComputedPositions) -> tuple[str, str]:
    """Return the first aspect in which a result differs from the meaning, and the rest of a
    sentence whose subject is the runtime: what it does, and as what the file was read."""
    assert case.meaning is not None
    difference = next(differences(computed, case.meaning.computed, TOLERANCE))
    return difference.aspect, _difference_in_words(difference)


def _difference_in_words(difference: Difference) -> str:
    """Return what a runtime does, and as what the file was read, for somebody who reads a
    finding."""
    aspect, computed_value, meant_value, kind, pair = difference
    where = "" if kind == "all" else f" in {kind}"
    match aspect:
        case "pairs":
            what_it_does = f"rotates {computed_value} pairs of channels{where}"
            read_as = f"{meant_value}"
        case "frequencies":
            what_it_does = (
                f"rotates pair {pair} by {computed_value:.6g} radians per position{where}"
            )
            read_as = f"{meant_value:.6g}"
        case "multiplier":
            what_it_does = f"multiplies cos and sin by {computed_value:.6g}{where}"
            read_as = f"{meant_value:.6g}"
        case "layers" if computed_value is None:
            what_it_does = f"rotates nothing{where}"
            read_as = "rotating there"
        case "layers":
            what_it_does = f"does not rotate the layers {list(computed_value)}"
            read_as = f"{list(meant_value)}"
        case _:
            what_it_does = f"multiplies q.k by {computed_value:.6g}"
            read_as = f"{meant_value:.6g}"
    return f"{what_it_does}; this file was read as {read_as}"
