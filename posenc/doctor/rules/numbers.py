"""Numbers that cannot be meant: bounds in the wrong order, factors and shares out of range."""

from collections.abc import Iterator, Mapping
from typing import Any

from posenc.doctor.case import ALL, ORIGINAL, Case
from posenc.doctor.rule import Hit, rule, wrong

SMALLEST_BASE = 10
"""A smaller rope_theta gives all pairs nearly one speed; published bases start at 100."""


def _numbers(p: Mapping[str, Any], *names: str) -> list[int | float]:
    """Return the values of these keys; empty unless all are numbers."""
    values = [p.get(name) for name in names]
    found = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return found if len(found) == len(names) else []


@rule("PD044", "E")
def backwards(case: Case) -> Iterator[Hit]:
    """Report a length or factor that stretches nothing, or backwards."""
    given = case.config.get("max_position_embeddings") is not None
    for name, p in case.of_type("linear", "dynamic", "yarn", "longrope", "llama3"):
        if (values := _numbers(p, "factor")) and 0 < values[0] < 1:
            yield wrong(
                f"{name} has factor {values[0]:g}; stretching to {1 / values[0]:g} times the "
                f"length is factor {1 / values[0]:g}",
                f'If it is to be stretched, write "factor": {1 / values[0]:g}.',
            )
        original, largest = case.original_length(p), case.model.max_positions
        if isinstance(original, int | float) and original > largest:
            yield wrong(
                f"{ORIGINAL} {original:g} of {name} is above max_position_embeddings {largest}"
                + ("" if given else f", {case.model.model_type}'s default where the key is missing")
            )


@rule("PD045", "E")
def bounds(case: Case) -> Iterator[Hit]:
    """Report bounds of a ramp, or lists of factors, that are exchanged."""
    for name, p in case.of_type("llama3"):
        values = _numbers(p, "low_freq_factor", "high_freq_factor")
        step = case.model.model_type.startswith("llama4") and len({*values}) == 1  # published so
        if values and not values[0] < values[1] and not step:
            swapped = f'"low_freq_factor": {values[1]:g}, "high_freq_factor": {values[0]:g}'
            yield wrong(
                f"{name} has low_freq_factor {values[0]:g}, not below high_freq_factor "
                f"{values[1]:g}",
                f"If they are exchanged, write {swapped}." if values[0] > values[1] else "",
            )
    for name, p in case.of_type("yarn"):
        values = _numbers({"beta_fast": 32, "beta_slow": 1, **p}, "beta_fast", "beta_slow")
        if values and values[0] < values[1]:  # equal ones are a step: Kimi K2
            yield wrong(f"{name} has beta_fast {values[0]:g}, not above beta_slow {values[1]:g}")
    for name, p in case.of_type("longrope", "su"):
        short, long = p.get("short_factor"), p.get("long_factor")
        if isinstance(short, list) and isinstance(long, list) and sum(long) < sum(short):
            yield wrong(
                f"{name} has a long_factor below its short_factor: a longer text would get the "
                "faster frequencies",
                "Exchange the two lists.",
            )


@rule("PD046", "E")
def impossible(case: Case) -> Iterator[Hit]:
    """Report a number that no rotation has."""
    for name, p in case.of_type("longrope", "su"):
        for key in ("short_factor", "long_factor"):
            values = p.get(key)
            low = [v for v in values if not v > 0] if isinstance(values, list) else []
            if low:
                yield wrong(
                    f"{name}.{key} has {len(low)} factors that are not above 0, such as {low[0]:g}"
                )
    modern = case.model.facts.get("transformers5", {})
    most = max(1, modern.get("partial_rotary_factor", 1))  # EfficientLoFTR has 4
    for place, values in (("the top level", case.config), *case.dicts()):
        for theta in _numbers(values, "rope_theta"):
            if 0 < theta < SMALLEST_BASE:
                yield wrong(f"rope_theta in {place} is {theta:g}, expected 100 or more")
        for dims in _numbers(values, modern.get("dims_key", "")):
            if not 0 < dims <= case.model.head_dim or dims % 2:
                yield wrong(
                    f"{modern['dims_key']} is {dims:g}, expected an even number, at most the "
                    f"{case.model.head_dim} channels of a head"
                )
        for key in dict.fromkeys(("partial_rotary_factor", modern.get("share_key", ""))):
            for share in _numbers(values, key):
                if not 0 < share <= most:
                    yield wrong(
                        f"{key} in {place} is {share:g}, expected a fraction above 0, at most 1",
                        f'Write "{key}": {share / 100:g} if {share:g} % is meant.'
                        if 1 < share <= 100
                        else "",
                    )


@rule("PD049", "E")
def uneven(case: Case) -> Iterator[Hit]:
    """Report heads that cannot be cut from the width, or into pairs."""
    if case.metadata is not None:
        return
    widths = ("hidden_size", "num_attention_heads")
    sizes, facts = _numbers(case.config, *widths), case.model.facts
    stated = case.model.mla or case.model.get("head_dim") is not None
    # A class's own defaults may be uneven, as those of GLM-4.5.
    sure = stated or sizes != _numbers(facts.get("defaults", {}), *widths)
    size, share = case.model.head_dim, case.model.share
    whole = not isinstance(share, int | float) or int(size * share) == size
    if size % 2 and whole and "axes" not in facts.get("transformers5", {}):
        key = "qk_rope_head_dim" if case.model.mla else "head_dim"
        yield Hit(
            f"{key} is {size}, an odd number: a pair needs two channels",
            (),
            ALL,
            contradiction=sure,
        )
    if case.model.mla:
        return
    if sizes and not stated and sizes[0] % sizes[1]:
        yield Hit(
            f"hidden_size {sizes[0]:g} is not a multiple of num_attention_heads {sizes[1]:g}, and "
            "there is no head_dim",
            (),
            ALL,
            contradiction=sure,
        )
    heads = _numbers(case.config, "num_attention_heads", "num_key_value_heads")
    if heads and (heads[1] < 1 or heads[0] % heads[1]):
        yield wrong(
            f"num_attention_heads {heads[0]:g} is not a multiple of num_key_value_heads "
            f"{heads[1]:g}"
        )
