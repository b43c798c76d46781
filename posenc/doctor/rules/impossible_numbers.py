"""Numbers that cannot be meant: bounds in the wrong order, factors and shares out of range."""

from collections.abc import Iterator, Mapping
from typing import Any

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, contradiction_hit, rule
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY

SMALLEST_BASE = 10
"""A smaller rope_theta gives all pairs nearly one speed; published bases start at 100."""

KEYS_OF_HEAD_WIDTH = ("hidden_size", "num_attention_heads")


def _values_if_all_numbers(p: Mapping[str, Any], *names: str) -> list[int | float]:
    """Return the values of these keys; empty unless all are numbers."""
    values = [p.get(name) for name in names]
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return numbers if len(numbers) == len(names) else []


@rule("PD044", "E")
def report_factor_or_length_that_shrinks(case: Case) -> Iterator[Hit]:
    """Report a length or factor that stretches nothing, or backwards."""
    origin_in_words = f", {case.model.model_type}'s default where the key is missing"
    if case.config.get("max_position_embeddings") is not None:
        origin_in_words = ""
    for name, p in case.rope_dicts_of_type("linear", "dynamic", "yarn", "longrope", "llama3"):
        for factor in _values_if_all_numbers(p, "factor"):
            if 0 < factor < 1:
                yield contradiction_hit(
                    f"{name} has factor {factor:g}; stretching to {1 / factor:g} times the "
                    f"length is factor {1 / factor:g}",
                    f'If it is to be stretched, write "factor": {1 / factor:g}.',
                )
        original_length = case.original_length(p)
        max_length = case.model.max_positions
        if isinstance(original_length, int | float) and original_length > max_length:
            yield contradiction_hit(
                f"{ORIGINAL_LENGTH_KEY} {original_length:g} of {name} is above "
                f"max_position_embeddings {max_length}{origin_in_words}"
            )


@rule("PD045", "E")
def report_exchanged_bounds(case: Case) -> Iterator[Hit]:
    """Report bounds of a ramp, or lists of factors, that are exchanged."""
    yield from _report_bounds_of_llama3(case)
    for name, p in case.rope_dicts_of_type("yarn"):
        betas = _values_if_all_numbers(
            {"beta_fast": 32, "beta_slow": 1, **p}, "beta_fast", "beta_slow"
        )
        if betas and betas[0] < betas[1]:  # equal ones are a step: Kimi K2
            yield contradiction_hit(
                f"{name} has beta_fast {betas[0]:g}, not above beta_slow {betas[1]:g}"
            )
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        short_factors = p.get("short_factor")
        long_factors = p.get("long_factor")
        if (
            isinstance(short_factors, list)
            and isinstance(long_factors, list)
            # By their sums: single long factors may be below their short ones.
            and sum(long_factors) < sum(short_factors)
        ):
            yield contradiction_hit(
                f"{name} has a long_factor below its short_factor: a longer text would get the "
                "faster frequencies",
                "Exchange the two lists.",
            )


def _report_bounds_of_llama3(case: Case) -> Iterator[Hit]:
    """Report bounds of llama3's ramp that are equal or exchanged; not the equal ones with which
    Llama 4 was published."""
    for name, p in case.rope_dicts_of_type("llama3"):
        bounds_of_ramp = _values_if_all_numbers(p, "low_freq_factor", "high_freq_factor")
        if not bounds_of_ramp:
            continue
        low, high = bounds_of_ramp
        is_published_step = case.model.model_type.startswith("llama4") and low == high
        if low < high or is_published_step:
            continue
        swapped = f'"low_freq_factor": {high:g}, "high_freq_factor": {low:g}'
        yield contradiction_hit(
            f"{name} has low_freq_factor {low:g}, not below high_freq_factor {high:g}",
            f"If they are exchanged, write {swapped}." if low > high else "",
        )


@rule("PD046", "E")
def report_impossible_numbers(case: Case) -> Iterator[Hit]:
    """Report factors of longrope that are not above 0, a base below SMALLEST_BASE, a rotated share
    that is no fraction, and a number of rotated channels that a head does not have."""
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        for key in ("short_factor", "long_factor"):
            values = p.get(key)
            wrong_values = [v for v in values if not v > 0] if isinstance(values, list) else []
            if wrong_values:
                yield contradiction_hit(
                    f"{name}.{key} has {len(wrong_values)} factors that are not above 0, such as "
                    f"{wrong_values[0]:g}"
                )
    for place, values in (("the top level", case.config), *case.flat_rope_dicts()):
        for theta in _values_if_all_numbers(values, "rope_theta"):
            if 0 < theta < SMALLEST_BASE:
                yield contradiction_hit(f"rope_theta in {place} is {theta:g}, expected 100 or more")
        yield from _report_impossible_dims(case, values)
        yield from _report_impossible_shares(case, place, values)


def _report_impossible_dims(case: Case, values: Mapping[str, Any]) -> Iterator[Hit]:
    """Report a number of rotated channels that a head does not have, or that makes no pairs."""
    key = case.model.facts.get("transformers5", {}).get("dims_key", "")
    for num_dims in _values_if_all_numbers(values, key):
        if not 0 < num_dims <= case.model.head_dim or num_dims % 2:
            yield contradiction_hit(
                f"{key} is {num_dims:g}, expected an even number, at most the "
                f"{case.model.head_dim} channels of a head"
            )


def _report_impossible_shares(case: Case, place: str, values: Mapping[str, Any]) -> Iterator[Hit]:
    """Report a rotated share that is no fraction, by either of the family's keys for it."""
    modern = case.model.facts.get("transformers5", {})
    largest_share = max(1, modern.get("partial_rotary_factor", 1))  # EfficientLoFTR has 4
    for key in dict.fromkeys(("partial_rotary_factor", modern.get("share_key", ""))):
        for share in _values_if_all_numbers(values, key):
            if 0 < share <= largest_share:
                continue
            may_be_percent = 1 < share <= 100
            yield contradiction_hit(
                f"{key} in {place} is {share:g}, expected a fraction above 0, at most 1",
                f'Write "{key}": {share / 100:g} if {share:g} % is meant.'
                if may_be_percent
                else "",
            )


@rule("PD049", "E")
def report_uneven_heads(case: Case) -> Iterator[Hit]:
    """Report heads that cannot be cut from the width, or into pairs."""
    if case.metadata is not None:
        return
    yield from _report_odd_heads(case)
    if case.model.is_mla:
        return
    width_and_heads = _values_if_all_numbers(case.config, *KEYS_OF_HEAD_WIDTH)
    if width_and_heads and not _head_is_stated(case) and width_and_heads[0] % width_and_heads[1]:
        yield Hit(
            f"hidden_size {width_and_heads[0]:g} is not a multiple of num_attention_heads "
            f"{width_and_heads[1]:g}, and there is no head_dim",
            concerned=(),
            affected=ALL_RUNTIMES,
            is_contradiction=_file_states_head_sizes(case),
        )
    head_counts = _values_if_all_numbers(case.config, "num_attention_heads", "num_key_value_heads")
    if head_counts and (head_counts[1] < 1 or head_counts[0] % head_counts[1]):
        yield contradiction_hit(
            f"num_attention_heads {head_counts[0]:g} is not a multiple of num_key_value_heads "
            f"{head_counts[1]:g}"
        )


def _report_odd_heads(case: Case) -> Iterator[Hit]:
    """Report heads of which one channel is left over where all of them rotate."""
    head_dim = case.model.head_dim
    share = case.model.rotated_share
    rotates_whole = not isinstance(share, int | float) or int(head_dim * share) == head_dim
    has_axes = "axes" in case.model.facts.get("transformers5", {})
    if head_dim % 2 and rotates_whole and not has_axes:
        key = "qk_rope_head_dim" if case.model.is_mla else "head_dim"
        yield Hit(
            f"{key} is {head_dim}, an odd number: a pair needs two channels",
            concerned=(),
            affected=ALL_RUNTIMES,
            is_contradiction=_file_states_head_sizes(case),
        )


def _head_is_stated(case: Case) -> bool:
    """Return True if the width of a head does not follow from the width of the model."""
    return case.model.is_mla or case.model.get("head_dim") is not None


def _file_states_head_sizes(case: Case) -> bool:
    """Return True if the file gives the sizes of the heads, and they are not the class's defaults.
    Those may be uneven, as in GLM-4.5, which is no mistake of the file."""
    defaults = case.model.facts.get("defaults", {})
    return _head_is_stated(case) or _values_if_all_numbers(
        case.config, *KEYS_OF_HEAD_WIDTH
    ) != _values_if_all_numbers(defaults, *KEYS_OF_HEAD_WIDTH)
