"""Resolve what a config means, read with goodwill, whether or not any runtime agrees.

It follows transformers 5, and reads old, missing or misplaced keys as their author must have meant
them. `doubts` lists every guess.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from posenc.dialects import formulas
from posenc.dialects.computed import ARITHMETIC, Computed, RefusedError, first_switch
from posenc.dialects.families import all_families
from posenc.dialects.files.spelling import NUMBERS, with_vendors_names
from posenc.dialects.model import TRAINED_KEY, BadConfigError, Model, model_of
from posenc.dialects.runtimes import transformers5

OLD_NAMES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "ntk-aware": "ntk"}
ORIGINAL = transformers5.ORIGINAL
YARN_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")


class UnknownFamilyError(ValueError):
    """A family that posenc has not read: nothing is said, fixed or proved of it."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in a ValueError about it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        kind = UnknownFamilyError if isinstance(error, UnknownFamilyError) else ValueError
        raise kind(f"{path}: {str(error).removeprefix(f'{path.name}: ')}") from error


@dataclass(frozen=True)
class Meaning:
    """computed: the frequencies meant at a length. parameters: the rope dict meant, by kind of
    layer. max_length: the longest sequence meant. trained_length: the length of the unscaled
    frequencies. doubts: what was guessed."""

    model: Model
    computed: Computed
    parameters: Mapping[str, Mapping[str, Any]]
    max_length: int
    trained_length: int
    doubts: tuple[str, ...]


def meaning_of(config: Mapping[str, Any], length: int | None = None) -> Meaning:
    """Resolve what a config.json's dict means at a length (default: the longest meant).

    Raises: UnknownFamilyError for a family whose meaning nobody has read; ValueError where the
    meaning is unclear.
    """
    known_family(model_of(config))
    doubts: list[str] = []
    model = model_of(_canonical(config, doubts))
    try:
        resolved = transformers5.resolve(model)
        layers, parameters = {}, {}
        for kind, p in resolved.items():
            parameters[kind] = _meant(p, model, kind, doubts)
        longest = max(_longest(p, model) for p in parameters.values())
        if length and any(p["rope_type"] == "dynamic" for p in parameters.values()):
            longest = max(longest, length)
        for kind, p in parameters.items():
            if len(model.without_rotation) < model.num_layers:
                own = model.of_kind(kind)
                layers[kind] = transformers5.rotation(dict(p), own, length or longest)
        scale = transformers5.softmax_scale(model, next(iter(parameters.values())))
    except BadConfigError:
        raise
    except (RefusedError, *ARITHMETIC) as refused:
        raise ValueError(f"cannot tell what the rotary keys mean: {refused}") from refused
    computed = Computed(
        None,
        layers,
        scale,
        first_switch(transformers5.switch(model, p) for p in parameters.values()),
        longest,
        model.without_rotation,
    )
    trained = min(_trained(p, model) for p in parameters.values())
    return Meaning(model, computed, parameters, longest, trained, tuple(dict.fromkeys(doubts)))


def known_family(model: Model) -> None:
    """Raise UnknownFamilyError if posenc has not read what the family's code means by its keys."""
    if model.facts.get("transformers5"):
        if not model.null_head:
            return
        raise UnknownFamilyError(
            f"posenc does not know what head_dim null means for {model.model_type}, whose class "
            "has a number: remove the key, or write the number"
        )
    if not model.model_type:
        raise UnknownFamilyError(
            "config.json has no model_type, and its architectures name no family that posenc "
            "knows: write model_type"
        )
    parts = "text" in all_families().get(model.model_type, {})
    close = get_close_matches(model.model_type, all_families(), 1)
    near = f" (did you mean {close[0]!r}?)" if close else ""
    hint = " without a text_config" if parts else near
    raise UnknownFamilyError(
        f"posenc does not know the family {model.model_type!r}{hint} and judges nothing of it"
    )


def _canonical(config: Mapping[str, Any], doubts: list[str]) -> dict[str, Any]:
    """Return the config with one rope dict, settled types and real numbers."""
    model = model_of(config)
    modern = model.facts["transformers5"]
    own = {modern.get("theta_key"), modern.get("share_key"), *modern.get("theta_keys", {}).values()}
    result = with_vendors_names(dict(model.config), own)
    if model.inner_theta is not None:
        result["rope_theta"] = model.inner_theta
    for name in dict.fromkeys((*NUMBERS, *own)):
        if name in result:
            result[name] = _as_number(result[name], name, doubts)
    result = {k: v for k, v in result.items() if v is not None or k not in {"rope_theta", *own}}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(given := result.get(name), Mapping):
            result[name] = _settle_all(given, result, doubts)
    old, new = result.get("rope_scaling"), result.get("rope_parameters")
    if model.nested and old and not new and any(isinstance(v, Mapping) for v in old.values()):
        doubts.append("rope_scaling has a dict per kind of layer; it is taken for rope_parameters")
        result["rope_parameters"], old = result.pop("rope_scaling"), None
    elif model.nested and new and not any(isinstance(v, Mapping) for v in new.values()):
        if not modern.get("flat_new"):
            doubts.append("rope_parameters is flat; it is taken for the layers with full attention")
            result["rope_parameters"] = new = {"full_attention": new}
    if old and new and differing_keys(old, new, result):
        doubts.append("rope_scaling and rope_parameters differ; rope_scaling is taken")
    return result


def differing_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
    """Return the keys in which two rope dicts differ, after filling in types and the outer base."""
    filled = []
    if not any(isinstance(v, Mapping) for v in old.values()):
        inner = new.get("full_attention")
        new = inner if isinstance(inner, Mapping) else new
    for given in (old, new):
        p = dict(given)
        kind = p.pop("type", None)
        p.setdefault("rope_type", "default" if kind is None else kind)
        if p.get("rope_theta") is None and config.get("rope_theta") is not None:
            p["rope_theta"] = config["rope_theta"]
        filled.append({k: v for k, v in p.items() if v is not None})
    first, second = filled
    return sorted(k for k in first.keys() | second.keys() if first.get(k) != second.get(k))


def _settle_all(
    given: Mapping[str, Any], config: Mapping[str, Any], doubts: list[str]
) -> dict[str, Any]:
    if any(isinstance(v, Mapping) for v in given.values()):
        return {
            k: _settle(v, config, doubts) if isinstance(v, Mapping) else v for k, v in given.items()
        }
    return _settle(given, config, doubts)


def _settle(
    given: Mapping[str, Any], config: Mapping[str, Any], doubts: list[str]
) -> dict[str, Any]:
    p = {k: _as_number(v, k, doubts) if k in NUMBERS else v for k, v in given.items()}
    old, new = p.pop("type", None), p.get("rope_type")
    kind = new if new is not None else old
    if old is not None and new is not None and OLD_NAMES.get(old, old) != OLD_NAMES.get(new, new):
        doubts.append(f"type is {old!r} and rope_type {new!r}; rope_type is taken")
    if kind is None and p.get("factor") not in (None, 1, 1.0):
        kind = _guess_type(p)
        doubts.append(f"the rope dict has a factor and no type; {kind!r} is taken")
    if kind is not None:
        p["rope_type"] = OLD_NAMES.get(kind, kind)
    outer = config.get("original_max_position_embeddings")
    inner = p.get("original_max_position_embeddings")
    if inner is not None and outer is not None and inner != outer:
        doubts.append(f"the original length is {inner} inside and {outer} at the top level")
    return p


def _guess_type(p: Mapping[str, Any]) -> str:
    if "long_factor" in p:
        return "longrope"
    if "low_freq_factor" in p:
        return "llama3"
    if any(key in p for key in YARN_KEYS) or "original_max_position_embeddings" in p:
        return "yarn"
    return "linear"


def _as_number(value: Any, name: str, doubts: list[str]) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        return value
    doubts.append(f"{name} is the string {value!r}; {number:g} is taken")
    return number


def _meant(p: Mapping[str, Any], model: Model, kind: str, doubts: list[str]) -> dict[str, Any]:
    """Translate NTK types of vendors and attn_factor into transformers' keys."""
    p = dict(p)
    given = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
    inner = given.get(kind) if isinstance(given, Mapping) and kind in given else given
    if isinstance(inner, Mapping) and "truncate" in inner:
        p["truncate"] = inner["truncate"]  # transformers drops it where dicts are nested
    if isinstance(inner, Mapping) and p["rope_type"] in transformers5.STRETCHED:
        if inner.get(ORIGINAL) is None and model.config.get(ORIGINAL) is None:
            doubts.append(f"{ORIGINAL} is missing; {p[ORIGINAL]} is taken")
    if model.model_type in transformers5.OWN_MSCALES and p.get("attention_factor") is None:
        p["attention_factor"] = p.get("long_mscale")
    if p["rope_type"] == "ntk":
        dim = int(model.head_dim * p.get("partial_rotary_factor", 1.0))
        factor = float(p.pop("factor", 1.0))
        p["rope_theta"] = formulas.ntk_theta(float(p["rope_theta"]), factor, dim)
        p["rope_type"] = "default"
        doubts.append(f"type 'ntk' is taken as a base of {p['rope_theta']:g}")
    elif p["rope_type"] == "dynamic" and "alpha" in p:
        dim = int(model.head_dim * p.get("partial_rotary_factor", 1.0))
        p["rope_theta"] = formulas.ntk_theta(float(p["rope_theta"]), float(p["alpha"]), dim)
        p["rope_type"] = "default"
    elif p["rope_type"] == "yarn" and "attn_factor" in p and p.get("attention_factor") is None:
        usual = transformers5.yarn_multiplier(p, float(p["factor"]))
        copied = math.isclose(p["attn_factor"], usual, rel_tol=1e-3)
        p["attention_factor"] = usual if copied else usual * p["attn_factor"]
        doubts.append(
            f"attn_factor {p['attn_factor']:g} is taken "
            + ("as the temperature itself" if copied else "as a multiple of yarn's temperature")
        )
    return p


def _trained(p: Mapping[str, Any], model: Model) -> int:
    original = p.get("original_max_position_embeddings")
    if p["rope_type"] in transformers5.STRETCHED and isinstance(original, int | float):
        kept = model.config.get(TRAINED_KEY)
        return kept if is_length(kept) else int(original)
    return model.max_positions


def is_length(value: Any) -> TypeGuard[int]:
    """Return True for an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _longest(p: Mapping[str, Any], model: Model) -> int:
    """Return max_position_embeddings, or the length that yarn stretches to if that is longer."""
    longest, factor = model.max_positions, p.get("factor")
    if p["rope_type"] == "yarn" and isinstance(factor, int | float):
        return max(longest, formulas.stretched(_trained(p, model), factor))
    return longest
