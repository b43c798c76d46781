"""Every config class with rotary positions of the installed transformers, judged by posenc and held
to its real modules: python -m tests.doctor.oracles.sweep [FAMILY...]

A family is right if posenc says what the modules compute from the class's defaults and from each
variation of them, or both refuse. Writes swept.json; exits 1 if a family that posenc knows differs.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import transformers

from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import FAMILIES_WITHOUT_ROTATION, RUNTIME_FILES, facts_of_family
from posenc.runtimes.known import RELEASES, RUNTIMES
from tests.doctor.oracles import real, swept

TOLERANCE = 2e-6
"""Relative. The ramp of yarn is computed in float32: 1.8e-6 off for gpt-oss."""
RUNTIME = f"transformers-{transformers.__version__.partition('.')[0]}"
CELL = RUNTIME_FILES[RUNTIME]
VERSION = None if RELEASES[RUNTIME].read == transformers.__version__ else transformers.__version__
"""What posenc is asked for; None for the version that it was read from."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
NOT_KNOWN = frozenset(
    """
    blt clvp_encoder codegen cohere_compass_text dory edgetam_video gptj hy_v4_vl_text
    llama4_vision_model molmo2_text musicflamingo roformer sam2_video sam3_tracker_video
    seamless_m4t t5_gemma_module
    """.split()
)
"""model_types with rotary keys that nobody has read yet; a class that is not here must be known."""
TOLERATED = ("other heads", "another rotated part")
"""What a class may refuse for other sizes than those of positions."""
LONGROPE, SHORT = "longrope", 8
OLD = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")


def variations(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configs of a family, with the name of what was changed."""
    yield "defaults", raw
    needed = {key: raw[key] for key in real.NEEDED.get(raw["model_type"], ())}
    yield "model_type alone", {**needed, "model_type": raw["model_type"]}
    bare = {k: v for k, v in raw.items() if k not in OLD}
    yield "another base, old dialect", {**bare, "rope_theta": 54321.0}
    given = raw.get("rope_parameters") or {}
    nested = {k: v for k, v in given.items() if isinstance(v, dict)}
    if nested:
        yield (
            "another base, by kind",
            {
                **raw,
                "rope_parameters": {k: {**v, "rope_theta": 54321.0} for k, v in nested.items()},
            },
        )
        yield (
            "yarn, by kind",
            {
                **raw,
                "rope_parameters": {k: {**v, **YARN} for k, v in nested.items()},
            },
        )
        yield (
            "yarn, by kind, old dialect",
            {
                **bare,
                "rope_scaling": {k: {**v, **YARN} for k, v in nested.items()},
            },
        )
    else:
        yield (
            "another base, new dialect",
            {**raw, "rope_parameters": {**given, "rope_theta": 54321.0}},
        )
        yield "yarn", {**raw, "rope_parameters": {**given, "rope_theta": 54321.0, **YARN}}
    facts = (facts_of_family(raw["model_type"]) or {}).get(CELL) or {}
    for key in {*facts.get("theta_keys", {}).values()} - {"", "rope_theta"}:
        yield f"another {key}", {**bare, key: 54321}
    yield "yarn, old dialect", {**bare, "rope_theta": 54321.0, "rope_scaling": YARN}
    linear = {"rope_type": "linear", "factor": 8.0}
    yield "linear, old dialect", {**bare, "rope_theta": 54321.0, "rope_scaling": linear}
    yield (
        "linear, by both names",
        {**bare, "rope_theta": 54321.0, "rope_scaling": {"type": "linear", **linear}},
    )
    named = {"type" if k == "rope_type" else k: v for k, v in YARN.items()}
    yield "yarn, by type alone", {**bare, "rope_theta": 54321.0, "rope_scaling": named}
    for share in (0.25, 0.5):
        yield (
            f"{share:g} of each head",
            {**bare, "rope_theta": 54321.0, "partial_rotary_factor": share},
        )
    if not nested:
        yield (
            "0.25 of each head, new dialect",
            {**raw, "rope_parameters": {**given, "partial_rotary_factor": 0.25}},
        )
    for scaling in (LLAMA3, {"rope_type": "dynamic", "factor": 4.0}):
        yield (
            f"{scaling['rope_type']}, old dialect",
            {**bare, "rope_theta": 54321.0, "rope_scaling": scaling},
        )
    yield from mistakes(raw, bare)
    if "head_dim" in raw or "qk_rope_head_dim" in raw:
        yield "head_dim null", {**raw, "head_dim": None}
    if "head_dim" not in raw and "qk_rope_head_dim" in raw:
        yield "a head beside the rotated part", {**raw, "head_dim": 2 * raw["qk_rope_head_dim"]}
    if isinstance(raw.get("head_dim"), int):
        yield "other heads", {**raw, "head_dim": 2 * raw["head_dim"]}


def mistakes(raw: dict[str, Any], bare: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dicts in the place or the shape of others, keys in the wrong one, and what is missing."""
    base = {"rope_theta": 54321.0}
    plain = {"rope_type": "default", **base}
    kinds = {"full_attention": plain, "sliding_attention": {**plain, "rope_theta": 4321.0}}
    yield "flat, new dialect", {**bare, "rope_parameters": plain}
    yield "flat yarn, new dialect", {**bare, "rope_parameters": {**YARN, **base}}
    if raw["model_type"] not in ("lfm3", "dots3_note_text"):  # where null is an error
        yield "a dict per kind", {**bare, "rope_theta": 777.0, "rope_parameters": kinds}
        null = {**kinds, "sliding_attention": None}
        yield "a kind is null", {**bare, "rope_theta": 777.0, "rope_parameters": null}
    linear = {"rope_type": "linear", "factor": 8.0}
    yield "linear beside the newer dict", {**raw, "rope_scaling": linear}
    yield "a base in the older dict", {**bare, "rope_scaling": {**YARN, **base}}
    share = {"partial_rotary_factor": 0.25}
    yield "a share in the older dict", {**bare, **base, "rope_scaling": {**YARN, **share}}
    yield "a share in the newer dict", {**bare, "rope_parameters": {**linear, **base, **share}}
    short = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    yield "no original length", {**bare, **base, "rope_scaling": short}
    for inner in (short, YARN):
        outside = {"rope_scaling": inner, "original_max_position_embeddings": 512}
        yield f"an original length outside of {len(inner)} keys", {**bare, **base, **outside}
    for more in (
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"attention_factor": 0.8},
        {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    ):
        yield f"yarn with {' and '.join(more)}", {**bare, **base, "rope_scaling": {**YARN, **more}}
    for name, odd in (
        ("two types", {**linear, "type": "dynamic"}),
        ("su", {"type": "su", "factor": 2.0}),
        ("an unknown type", {"rope_type": "magic", "factor": 2.0}),
        ("ntk", {"type": "ntk", "factor": 2.0}),
        ("no type", {"factor": 2.0}),
        ("no llama3 length", {k: v for k, v in LLAMA3.items() if not k.startswith("original")}),
    ):
        yield name, {**bare, **base, "rope_scaling": odd}
    if not any(isinstance(v, dict) for v in (raw.get("rope_parameters") or {}).values()):
        if raw["model_type"] != "esm":
            yield "a null base", {**bare, "rope_theta": None}
        if raw["model_type"] != "cohere2_moe":
            yield "an empty newer dict", {**bare, **base, "rope_parameters": {}}
    full = list(RUNTIMES[RUNTIME](raw, None, VERSION).rotations.values())
    pairs = range(len(full[0].inv_freq) if full else 0)
    lists = {"short_factor": [1 + i / 99 for i in pairs], "long_factor": [2 + i / 9 for i in pairs]}
    longrope = {"rope_type": LONGROPE, "factor": 4.0, **lists}
    inside = {**longrope, "original_max_position_embeddings": 512}
    yield LONGROPE, {**bare, **base, "rope_scaling": inside}
    yield f"{LONGROPE}, new dialect", {**bare, "rope_parameters": {**inside, **base}}
    outside = {"rope_scaling": longrope, "original_max_position_embeddings": 512}
    yield f"{LONGROPE}, length outside", {**bare, **base, **outside}
    if "qk_rope_head_dim" in raw:
        yield "another rotated part", {**raw, "qk_rope_head_dim": 2 * raw["qk_rope_head_dim"]}
    if isinstance(raw.get("head_dim"), int):
        yield "no head_dim", {k: v for k, v in raw.items() if k != "head_dim"}


def differs(config: type, found: list, raw: dict[str, Any], changed: str, build: Any = None) -> str:
    """Why posenc's answer is not the real one; empty if it is. build: the config, if not made from
    the same dict."""
    try:
        built = build or config.from_dict(json.loads(json.dumps(raw)))
        wanted = {}
        again = any("local" in r[0] or not real.takes_config(r, config) for r in found)
        if again:  # the model changes the config for a module, or hands it numbers
            found = real.rotary_modules(built)
        for rotary in found:
            wanted |= real.rebuilt(rotary, None if again else built)
        if "sliding_attention" in wanted and "all" in wanted:
            wanted["full_attention"] = wanted.pop("all")
        refused = ""
    except Exception as error:  # whatever a class of transformers raises
        wanted, refused = {}, f"{type(error).__name__}: {error}".split("\n")[0][:120]
    try:
        # A module that is built has the short list of longrope.
        got = RUNTIMES[RUNTIME](raw, SHORT if LONGROPE in changed else None, VERSION)
    except ValueError as error:
        return "" if refused else f"posenc: {error}"
    if got.known == "unknown":
        return ""
    if got.error and not refused:
        refused = real.refusal(built)
    if refused:
        return (
            ""
            if got.error or got.stop_message or changed in TOLERATED
            else f"the class refuses ({refused}), posenc does not"
        )
    return compared(raw, wanted, got)


def compared(raw: dict[str, Any], wanted: dict[str, Any], got: Any) -> str:
    """Why an emulator's answer is not what the modules have; empty if it is."""
    if got.error:
        return f"posenc refuses: {got.error}"
    unused = {kind for kind in wanted.keys() - got.rotations.keys() if not _layers_of(raw, kind)}
    if set(wanted) - unused != set(got.rotations):
        return f"kinds {sorted(got.rotations)}, they are {sorted(wanted)}"
    for kind, layer in got.rotations.items():
        inv_freq, multiplier = wanted[kind]
        if len(layer.inv_freq) != len(inv_freq):
            return f"{kind}: {len(layer.inv_freq)} pairs, they are {len(inv_freq)}"
        for a, b in zip(layer.inv_freq, inv_freq, strict=True):
            if not abs(a - b) <= TOLERANCE * abs(b) + 1e-20:
                return f"{kind}: {a:.7g}, it is {b:.7g}"
        if not abs(layer.multiplier - multiplier) <= TOLERANCE * multiplier:
            return f"{kind}: multiplier {layer.multiplier}, it is {multiplier}"
    return ""


def _layers_of(raw: dict[str, Any], kind: str) -> tuple[int, ...]:
    """The layers of a kind; a module may have frequencies for kinds that no layer has."""
    model = model_of(raw)
    return model.layers_of_kind(kind) if model.has_rope_dict_per_kind else (0,)


def sweep(only: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """By config class: model_type, verdict (right, differs, not known, no modules), and why."""
    answer = {}
    for name, config in sorted(real.config_classes().items()):
        if only and name not in only and config.model_type not in only:
            continue
        row: dict[str, Any] = {"model_type": config.model_type, "why": {}}
        answer[name] = row
        try:
            found = real.rotary_modules(real.default(config))
        except Exception as error:  # whatever a class of transformers raises
            row |= {"verdict": "cannot be built", "why": {"": f"{error}".split("\n")[0][:160]}}
            continue
        raw = real.as_json(real.default(config))
        if config.model_type in FAMILIES_WITHOUT_ROTATION:
            row["verdict"] = "differs" if found else "right"
            continue
        if not facts_of_family(config.model_type) or CELL not in (
            facts_of_family(config.model_type) or {}
        ):
            row["verdict"] = "not known"
            continue
        if RUNTIMES[RUNTIME](raw, None, VERSION).known == "unknown":
            row["verdict"] = "not read in this version"
            continue
        if found and not any(real.has_buffers(rotary, config) for rotary in found):
            row["verdict"] = "has no buffers to compare"
            continue
        for changed, varied in variations(raw):
            if "mrope_section" in (facts_of_family(config.model_type) or {})[CELL].get(
                "required", ()
            ):
                given = varied.get("rope_scaling") or {"rope_type": "default"}
                varied = {**varied, "rope_scaling": {"mrope_section": [16, 24, 24], **given}}
            if why := differs(config, found, varied, changed):
                row["why"][changed] = why
        row["verdict"] = "differs" if row["why"] else "right"
        row["modules"] = len(found)
    return answer


def composites() -> dict[str, str]:
    """By config class of several modalities, why posenc reads its language model otherwise than the
    class does; empty if it does not. Only those whose language model posenc knows."""
    answer = {}
    for name, config in sorted(real.composite_classes().items()):
        text = (facts_of_family(config.model_type) or {}).get("text")
        if text is None or CELL not in (facts_of_family(text) or {}):
            continue
        try:
            built = config()
            inner = built.get_text_config()
            found = real.rotary_modules(inner)
            raw = real.as_json(built)
        except Exception as error:  # whatever a class of transformers raises
            answer[name] = f"cannot be built: {error}".split("\n")[0][:160]
            continue
        if RUNTIMES[RUNTIME](raw, None, VERSION).known == "unknown":
            answer[name] = f"not known: {raw.get('text_config', {}).get('model_type')}"
            continue
        answer[name] = differs(type(inner), found, raw, "a tower", inner)
    return answer


def main(*only: str) -> int:
    real.quiet()
    answer = sweep(only)
    counts = Counter(row["verdict"] for row in answer.values())
    print(f"transformers {transformers.__version__}: {len(answer)} config classes, {dict(counts)}")
    for name, row in answer.items():
        if row["verdict"] == "differs":
            print(f"  {name} ({row['model_type']}): {row['why']}")
    verdicts = {name: (row["model_type"], row["verdict"]) for name, row in answer.items()}
    held = {} if only else composites()
    swept.keep(RUNTIME, transformers.__version__, verdicts, held, whole=not only)
    wrong = {name: why for name, why in held.items() if why}
    print(f"{len(held)} classes of several modalities, {len(held) - len(wrong)} right: {wrong}")
    rest = {r["model_type"] for r in answer.values() if r["verdict"] == "not known"} - {""}
    if new := rest - NOT_KNOWN if RUNTIME == "transformers-5" else set():
        print(f"not known and not listed: {', '.join(sorted(new))}")
    return int(
        counts["differs"] > 0 or bool(new) or any("cannot" not in why for why in wrong.values())
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
