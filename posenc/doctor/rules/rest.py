"""Command-line overrides, and what no other rule explains."""

from collections.abc import Iterable, Iterator

from posenc.dialects.computed import Computed
from posenc.doctor.case import Case
from posenc.doctor.rule import TABLE, Finding, Hit, rule

KEYS_OF = {
    "layers": "layer_types or the list of layers without rotation",
    "pairs": "head_dim or the rotated share (partial_rotary_factor)",
    "frequencies": "rope_theta or the rope dict",
    "multiplier": "attention_factor or the mscale pair",
    "scale": "mscale_all_dim or the head's width",
}
"""The keys that decide an aspect."""
OVERRIDES = "hf_overrides"
"""The key for command-line overrides next to a config's own keys."""


@rule("PD032", "E")
def override(case: Case) -> Iterator[Hit]:
    """Report an override of vLLM without rope_theta."""
    given = case.source.raw.get(OVERRIDES)
    if not isinstance(given, dict):
        return
    concerned = case.only_named(("vllm",))
    for name in ("rope_parameters", "rope_scaling"):
        p = given.get(name)
        inner = [v for v in p.values() if isinstance(v, dict)] if isinstance(p, dict) else ()
        if isinstance(p, dict) and any(v.get("rope_theta") is None for v in inner or [p]):
            yield Hit(f"the override of {name} has no rope_theta", concerned, ("vllm",))
    if "rope_theta" in given and case.source.raw.get("rope_parameters"):
        yield Hit(
            f"the override rope_theta {given['rope_theta']!r} has no effect: rope_parameters holds "
            "the base",
            concerned,
            ("vllm", "sglang"),
        )


@rule("PD038", "E")
def differs(case: Case) -> Iterator[Hit]:
    """Report a runtime that computes something else, for a reason of its own."""
    yield from ()


@rule("PD039", "E")
def refuses(case: Case) -> Iterator[Hit]:
    """Report a runtime that refuses the file."""
    yield from ()


def unexplained(case: Case, explained: Iterable[str]) -> list[Finding]:
    """Return findings for named runtimes that differ or refuse, unless an E names them already."""
    found = []
    for name in case.judges:
        computed, seen = case.computed[name], case.differences[name]
        if name in explained or not seen:
            continue
        rule_ = TABLE["PD039" if computed.error else "PD038"]
        where = f"{name}'s {computed.read}" if computed.read else name
        said = f"{name} refuses the file: {computed.error}"
        cure = (
            f"Write what its error names, which is raised around {where}, or use another runtime."
        )
        if not computed.error:
            aspect, numbers = _what(case, computed)
            said = f"{name} computes {numbers}"
            cure = (
                f"If {name} is right, change {KEYS_OF[aspect]} here, which this file was read by. "
                f"If the file is right, {where} does not read it: `--fix --out NEW` looks for a "
                "spelling that it reads."
            )
        # mlx-lm stops for any missing key; what is not about positions may be a part of a config.
        severity = "W" if computed.error and "error" not in seen else rule_.severity
        found.append(Finding(rule_.code, severity, said, (name,), cure))
    return found


def _what(case: Case, computed: Computed) -> tuple[str, str]:
    """Return the first aspect that differs, and the two numbers in words."""
    assert case.meaning is not None
    meant = case.meaning.computed
    for kind, layer in meant.layers.items():
        got = next((v for k, v in computed.layers.items() if k.startswith(kind)), None)
        if got is None:
            return "layers", f"no rotation for {kind}"
        where = "" if kind == "all" else f" in {kind}"
        if len(got.inv_freq) != len(layer.inv_freq):
            pairs = f"{len(got.inv_freq)} rotated pairs{where}, {len(layer.inv_freq)} are meant"
            return "pairs", pairs
        for i, (a, b) in enumerate(zip(got.inv_freq, layer.inv_freq, strict=True)):
            if not abs(a - b) <= 1e-5 * abs(b):
                said = f"{a:.6g} radians per position for pair {i}{where}, {b:.6g} are meant"
                return "frequencies", said
        if not abs(got.multiplier - layer.multiplier) <= 5e-4 * layer.multiplier:
            said = f"a multiplier of {got.multiplier:.6g}{where}, {layer.multiplier:.6g} is meant"
            return "multiplier", said
    if set(computed.without_rotation) != set(meant.without_rotation):
        return "layers", (
            f"no rotation in the layers {list(computed.without_rotation)}, meant are "
            f"{list(meant.without_rotation)}"
        )
    ours, theirs = computed.softmax_scale, meant.softmax_scale
    return "scale", f"a softmax scale of {ours:.6g}, {theirs:.6g} is meant"
