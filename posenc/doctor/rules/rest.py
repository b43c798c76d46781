"""Command-line overrides, and what no other rule explains."""

from collections.abc import Iterable, Iterator

from posenc.dialects.computed import Computed
from posenc.dialects.model import OUTSIDE, text_key
from posenc.dialects.writers.overrides import MERGES
from posenc.doctor.case import Case
from posenc.doctor.rule import TABLE, Finding, Hit, names, rule

KEYS_OF = {
    "layers": "layer_types or the list of layers without rotation",
    "pairs": "head_dim or the rotated share (partial_rotary_factor)",
    "frequencies": "rope_theta or the rope dict",
    "multiplier": "attention_factor or the mscale pair",
    "scale": "mscale_all_dim or the head's width",
}
"""The keys that decide an aspect."""
SERVERS = ("vllm", "sglang")
OVERRIDES = "hf_overrides"
"""The key for command-line overrides next to a config's own keys."""


@rule("PD032", "E")
def override(case: Case) -> Iterator[Hit]:
    """Report an override that a server does not read, or that loses the base."""
    given = case.source.raw.get(OVERRIDES)
    if not isinstance(given, dict):
        return
    key = text_key(case.source.config)
    own = given.get(key, {}) if key else given
    unread = [name for name in given if key and name in OUTSIDE]
    if unread:
        one = len(unread) == 1
        yield Hit(
            f"the override of {names(unread)} {'stands' if one else 'stand'} at the top level, "
            f"where no server looks for {'it' if one else 'them'}: "
            f"{case.source.config['model_type']} reads its {key}",
            case.only_named(SERVERS),
            SERVERS,
            cure=f'Write {{"{key}": {{"{unread[0]}": ...}}}}; `posenc doctor --overrides vllm` '
            "prints the whole.",
        )
    if not isinstance(own, dict):
        return
    replaced = {name for name in SERVERS if (name, "inside" if key else "top") not in MERGES}
    for name in ("rope_parameters", "rope_scaling"):
        p = own.get(name)
        inner = [v for v in p.values() if isinstance(v, dict)] if isinstance(p, dict) else ()
        if isinstance(p, dict) and any(v.get("rope_theta") is None for v in inner or [p]):
            for server in SERVERS:
                if server in replaced:
                    said = f"the override of {name} has no rope_theta, and {server} replaces"
                    yield Hit(f"{said} the dict", case.only_named((server,)), (server,))
    if "rope_theta" in own:
        yield Hit(
            f"the override rope_theta {own['rope_theta']!r} has no effect: rope_parameters holds "
            "the base",
            case.only_named(SERVERS),
            SERVERS,
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
