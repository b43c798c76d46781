"""Tabulate what each runtime computes from the spellings of a rope config, from posenc's emulators.

The page evaluates no rules of its own: each family and runtime has one answer for each spelling,
`None` where the answer depends on more than the spelling says. Sizes and factors are unusual
numbers here, so that an answer says which of a config's numbers it was computed from.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import string
from collections.abc import Iterator, Set
from functools import cache, partial
from pathlib import Path
from typing import Any

from posenc import runtimes
from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation
from posenc.runtimes.families import FAMILIES_WITHOUT_ROTATION, RUNTIME_FILES, all_families
from posenc.runtimes.known import RELEASES, RUNTIMES
from posenc.runtimes.runtime_facts import Transformers5Facts

ROOM = Path(str(runtimes.__file__)).parent
SIZES = {"hidden_size": 384, "num_attention_heads": 4, "num_hidden_layers": 4}
HEAD_DIM, EVEN = 80, 96
LENGTHS = {"max": 10240, "inner": 1280, "outer": 2304}
USUAL_LENGTHS = (4096, 8192)
"""Training lengths that a runtime takes where the config has none."""
THETAS = {"outer": 10007.0, "inner": 500009.0}
FACTOR, LOW, HIGH, SHORT, LONG = 4.0, 2.0, 5.0, 1.5, 2.5
SHARES = (0.25, 0.4, 0.5, 0.75)
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
ORIGINAL = "original_max_position_embeddings"
HANDLED = (
    frozenset(
        f"model_type architectures head_dim rope_theta rope_scaling rope_parameters {ORIGINAL} "
        "max_position_embeddings".split()
    )
    | SIZES.keys()
)
MODERN = ("vllm", "sglang", "mlx_lm", "llama_cpp")
HARMLESS: dict[str, list[Any]] = {
    "rope_scaling": [None],
    "head_dim": [None],
    "sliding_window": [None, 4096, 100],
    "use_sliding_window": [False],
    "attention_bias": [False, True],
    "mlp_bias": [False, True],
    "layer_types": [["full_attention"] * SIZES["num_hidden_layers"]],
    "num_key_value_heads": [4, 1],
    "num_experts_per_tok": [2],
    "norm_topk_prob": [True, False],
    "moe_intermediate_size": [96],
    "num_local_experts": [8],
    "num_experts": [8],
    "n_routed_experts": [4, 64],
    "n_shared_experts": [1],
    "n_group": [1],
    "first_k_dense_replace": [1],
    "hidden_act": ["gelu", "silu"],
    "norm_eps": [1e-5],
    "intermediate_size": [96, 11008],
    "rms_norm_eps": [1e-5, 1e-6],
    "vocab_size": [64, 151936],
    "tie_word_embeddings": [True, False],
    "use_qk_norm": [True, False],
    "rope.beta_fast": [32, 32.0],
    "rope.beta_slow": [1, 1.0],
}
"""Keys that emulators read, with values; those that change no answer of a family are left out of
account for it."""


def spellings() -> Iterator[tuple[str, ...]]:
    """Yield container, key of the type, type, place of theta, place of the original length,
    whether a factor is given, whether head_dim is given.

    In "both" containers are the same settings, theta in rope_parameters ("both") or in each
    ("all")."""
    for theta, head in itertools.product(("none", "outer"), "01"):
        yield "none", "", "default", theta, "none", "0", head
    keys = itertools.product(
        ("rope_scaling", "rope_parameters"),
        ("rope_type", "type", "both"),
        TYPES,
        ("none", "outer", "inner", "both"),
        ("none", "inner", "outer"),
        "01",
        "01",
    )
    for container, key, kind, theta, original, factor, head in keys:
        plain = kind in ("default", "linear")
        if (original == "none" or not plain) and (factor == "1") >= (
            kind not in ("yarn", "longrope", "default")
        ):
            yield container, key, kind, theta, original, factor, head
            if key != "type" and theta != "inner" and original != "outer":
                if container == "rope_scaling":  # and the same settings in rope_parameters
                    yield "both", key, kind, theta, original, factor, head
                elif theta == "both":
                    yield "both", key, kind, "all", original, factor, head


def config_of(family: str, spelling: tuple[str, ...], needs: list[str]) -> dict[str, Any]:
    """Return a config with this spelling."""
    container, key, kind, theta, original, factor, head = spelling
    config = {"model_type": family, **SIZES, "max_position_embeddings": LENGTHS["max"]}
    rope: dict[str, Any] = {} if not key else dict.fromkeys(_type_keys(key), kind)
    if head == "1":
        config["head_dim"] = HEAD_DIM
    if theta in ("outer", "both", "all"):
        config["rope_theta"] = THETAS["outer"]
    if theta in ("inner", "both", "all"):
        rope["rope_theta"] = THETAS["inner"]
    if original != "none":
        (rope if original == "inner" else config)[ORIGINAL] = LENGTHS[original]
    if factor == "1":
        rope["factor"] = FACTOR
    if kind == "llama3":
        rope |= {"low_freq_factor": LOW, "high_freq_factor": HIGH}
    if kind == "longrope":
        pairs = (HEAD_DIM if head == "1" else EVEN) // 2
        rope |= {"short_factor": [SHORT] * pairs, "long_factor": [LONG] * pairs}
    if container == "both":
        old = rope if theta == "all" else {k: v for k, v in rope.items() if k != "rope_theta"}
        config["rope_scaling"] = old
        config["rope_parameters"] = {k: v for k, v in rope.items() if k != "type"}
    elif container != "none":
        config[container] = rope
    return {**{key: NEEDED.get(key, 64) for key in needs}, **config}


def _type_keys(key: str) -> tuple[str, ...]:
    return ("rope_type", "type") if key == "both" else (key,)


def answer_of(
    computed: ComputedPositions, head: str, defaults: set[float]
) -> dict[str, Any] | None:
    """Return an answer in words of the spelling; None where it takes more."""
    if computed.known != "yes":
        return {"a": computed.known}
    if computed.error is not None:
        numbers = [*THETAS.values(), *LENGTHS.values(), SIZES["hidden_size"], HEAD_DIM, EVEN]
        numbers += [FACTOR, SHORT, LONG, HEAD_DIM // 2, EVEN // 2]
        why = reason(computed.error)
        of_these_numbers = any(str(n) in why for n in numbers)
        return None if of_these_numbers else {"a": "refuses", "why": why}
    if len(computed.rotations) != 1 or computed.without_rotation:
        return None
    (layer,) = computed.rotations.values()
    size = _size(2 * len(layer.inv_freq), head)
    rotation = _rotation(layer, defaults)
    if size is None or rotation is None:
        return None
    limits = {None: "none", LENGTHS["max"]: "max", int(LENGTHS["max"] * FACTOR): "stretched"}
    limit = limits.get(computed.max_length)
    if limit is None:
        return None
    return {"a": "computes", **size, **rotation, "limit": limit, "switch": computed.switch}


def reason(error: str) -> str:
    """Return an error without the values that it quotes, the names of a set in order."""
    error = re.sub(r", got (\{.*|\d+: .*)$", "", error)
    return re.sub(r"\{('[^{}]*')\}", lambda m: f"{{{', '.join(sorted(m[1].split(', ')))}}}", error)


def _size(dim: int, head: str) -> dict[str, Any] | None:
    own = HEAD_DIM if head == "1" else EVEN
    for share in (1, *SHARES):
        if dim == int(own * share):
            return {"dim": "own", "share": share}
    for share in (1, *SHARES):
        if head == "1" and dim == int(EVEN * share):
            return {"dim": "even", "share": share}
    return {"dim": dim, "share": 1} if head == "0" else None


@cache
def _candidates(dim: int, base: float, original: int) -> dict[str, tuple[float, ...]]:
    plain = float64_formulas.unscaled_frequencies(dim, base)
    longest = FACTOR * LENGTHS["max"]
    stretched = float64_formulas.dynamic_theta(base, FACTOR, longest, original, dim)
    divisors = float64_formulas.llama3_divisors(dim, base, FACTOR, LOW, HIGH, original)
    return {
        "default": plain,
        "linear": tuple(f / FACTOR for f in plain),
        "ntk": float64_formulas.unscaled_frequencies(
            dim, float64_formulas.ntk_theta(base, FACTOR, dim)
        ),
        "dynamic": float64_formulas.unscaled_frequencies(dim, stretched),
        "yarn": float64_formulas.yarn_frequencies(dim, base, FACTOR, original),
        "llama3": float64_formulas.divide_each(plain, divisors),
        "short": tuple(f / SHORT for f in plain),
        "long": tuple(f / LONG for f in plain),
    }


def _rotation(layer: LayerRotation, defaults: set[float]) -> dict[str, Any] | None:
    dim, scale = 2 * len(layer.inv_freq), _scale(layer.multiplier)
    thetas = {**THETAS, **{base: base for base in sorted(defaults)}}
    originals = {**LENGTHS, **{length: length for length in USUAL_LENGTHS}}
    pairs = itertools.product(thetas.items(), originals.items())
    for (theta, base), (place, original) in pairs if dim > 2 and scale else ():
        for kind, freq in _candidates(dim, float(base), original).items():
            if all(map(partial(math.isclose, rel_tol=1e-6), freq, layer.inv_freq)):
                uses = {"original": place} if kind in ("dynamic", "yarn", "llama3") else {}
                return {"type": kind, "theta": theta, "scale": scale, **uses}
    return None


def _scale(multiplier: float) -> str | None:
    named = {"1": 1.0, "yarn": float64_formulas.yarn_attention_factor(FACTOR)}
    for place in ("inner", "outer"):
        original = LENGTHS[place]
        named[f"longrope factor {place}"] = float64_formulas.longrope_attention_factor(
            FACTOR, original
        )
        named[f"longrope max {place}"] = float64_formulas.longrope_attention_factor(
            LENGTHS["max"] / original, original
        )
    named["longrope factor max"] = float64_formulas.longrope_attention_factor(
        FACTOR, LENGTHS["max"]
    )
    near = (n for n, v in named.items() if math.isclose(v, multiplier, rel_tol=1e-9))
    return next(near, None)


NEEDED = {key: values[-1] for key, values in HARMLESS.items()}


def _needs(facts: dict[str, Any], but: Set[str]) -> list[str]:
    """Return the keys without which mlx-lm does not load a family, but some."""
    needs = (facts.get("mlx_lm") or {}).get("needs", [])
    return [key for key in needs if key not in HANDLED and key not in but]


@cache
def read_keys() -> set[str]:
    """Return every word that the emulators' sources or the families' facts contain: a key that is
    none of them changes no answer."""
    words: set[str] = set()
    for path in [ROOM / "config_model.py", *(ROOM / "known").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= set(node.value.split())
    return words | set(_strings(all_families()))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for key, inner in value.items():
            yield from () if key == "needs" else _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def tabulated() -> list[str]:
    """Return the families that the page answers for: of one kind of layers, not latent."""
    found = []
    for name, facts in all_families().items():
        served = any(facts.get(cell) for cell in MODERN)
        nested = Transformers5Facts.of(facts.get("transformers5")).dicts_by_kind is not None
        latent = "qk_rope_head_dim" in facts.get("defaults", {})
        if served and "text" not in facts and not nested and not latent:
            found.append(name)
    return found


def answers_of(family: str, spelling: tuple[str, ...], extra: dict[str, Any] = {}) -> list[Any]:  # noqa: B006
    """Return the six runtimes' answers for a spelling, with extra keys in the config."""
    facts = all_families()[family]
    config = config_of(family, spelling, _needs(facts, read_keys() - HARMLESS.keys()))
    for key, value in extra.items():
        name = key.removeprefix("rope.")
        if name != key:
            for holder in ("rope_scaling", "rope_parameters"):
                if isinstance(config.get(holder), dict):
                    config[holder][name] = value
        elif name == key and (value is not None or key not in config):
            config[key] = value
    found = []
    for runtime, emulate in RUNTIMES.items():
        cells = [facts.get(cell) or {} for cell in (RUNTIME_FILES[runtime], "transformers5")]
        defaults = {1e4, *(float(cell["rope_theta"]) for cell in cells if "rope_theta" in cell)}
        found.append(answer_of(emulate(config), spelling[-1], defaults))
    return found


DIGITS = string.digits + string.ascii_lowercase


def _two_digits(number: int) -> str:
    """Return a number in base 36, as the page reads the columns."""
    high, low = divmod(number, len(DIGITS))
    return DIGITS[high] + DIGITS[low]


def table(report: Any = lambda name: None) -> dict[str, Any]:
    """Return the whole table of the page."""
    every = list(spellings())
    codes: dict[str, int] = {}
    columns: dict[str, int] = {}
    families: dict[str, Any] = {}
    read = read_keys() - HANDLED
    for name in tabulated():
        report(name)
        facts = all_families()[name]
        rows = [answers_of(name, spelling) for spelling in every]
        own = []
        for answers in zip(*rows, strict=True):
            numbers = [codes.setdefault(json.dumps(a), len(codes)) for a in answers]
            own.append(columns.setdefault("".join(map(_two_digits, numbers)), len(columns)))
        few = dict(list(zip(every, rows, strict=True))[1::37])
        harmless = [
            key
            for key, values in HARMLESS.items()
            if all(answers_of(name, s, {key: v}) == row for s, row in few.items() for v in values)
        ]
        families[name] = {
            "columns": own,
            "harmless": harmless,
            "architecture": facts.get("architecture"),
            "needs": _needs(facts, set()),
            "read": {r: facts[c]["read"] for r, c in RUNTIME_FILES.items() if facts.get(c)},
        }
    return {
        "runtimes": {name: RELEASES[name].read for name in RUNTIMES},
        "spellings": [" ".join(s) for s in every],
        "answers": [json.loads(code) for code in codes],
        "columns": list(columns),
        "families": families,
        "known": sorted(all_families()),
        "unrotated": sorted(FAMILIES_WITHOUT_ROTATION),
        "read": sorted(read | {k.removeprefix("rope.") for k in HARMLESS}),
    }
