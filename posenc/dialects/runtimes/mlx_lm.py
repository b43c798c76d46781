"""mlx-lm: the raw config.json into a dataclass per model file; unknown keys are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.dialects import formulas
from posenc.dialects.computed import (
    LOOKED_AT,
    Computed,
    Layer,
    RefusedError,
    Switch,
    UnknownModelError,
    number,
    required,
)
from posenc.dialects.model import Model
from posenc.dialects.runtimes.mlx_lm_rope import Scaling, initialize, rotation
from posenc.dialects.runtimes.running import emulator, version_of

NOT_READ = ("mimo_v2_flash",)


@emulator("mlx-lm")
def emulate(model: Model, length: int | None) -> Computed:
    """What mlx-lm 0.32 computes; it never refuses a length."""
    if model.known and "mlx" not in model.facts:
        raise UnknownModelError(f"mlx-lm has no model for {model.model_type!r}")
    if model.model_type in NOT_READ:
        raise UnknownModelError(f"posenc has not read how mlx-lm rotates {model.model_type!r}")
    facts = model.facts.get("mlx", {"file": "llama", "scaling": "initialize", "needs": []})
    _check_arguments(model, facts)
    theta, scaling = _settings(model, facts)
    length = length or model.max_positions
    full = rotation(model, facts, theta, scaling, length)
    return Computed(
        "mlx-lm",
        version_of("mlx-lm"),
        None,
        _layers(model, facts, full),
        _softmax_scale(model, scaling),
        _switch(model, facts, scaling),
        None,
        model.without_rotation,
    )


def _check_arguments(model: Model, facts: Mapping[str, Any]) -> None:
    missing = [name for name in facts["needs"] if name not in model.config]
    if missing:
        names = " and ".join(repr(name) for name in missing)
        plural = "s" if len(missing) > 1 else ""
        raise RefusedError(
            f"TypeError: ModelArgs.__init__() missing {len(missing)} required positional "
            f"argument{plural}: {names}"
        )


def _settings(model: Model, facts: Mapping[str, Any]) -> tuple[float, Scaling]:
    """Theta and the scaling dict; only some model files look into rope_parameters."""
    theta: Any = model.config.get("rope_theta", facts.get("rope_theta"))
    if facts["file"] == "gpt_neox":
        theta = model.config.get("rotary_emb_base")
    scaling = model.config.get("rope_scaling")
    modern = model.config.get("rope_parameters")
    if facts["file"] in ("deepseek_v2", "minicpm3") and scaling is None:
        raise RefusedError("AttributeError: 'NoneType' object has no attribute 'get'")
    if facts["file"] == "ministral3":
        return _ministral(modern)
    if facts.get("parameters") and isinstance(modern, Mapping) and modern:
        flat = modern.get("full_attention", modern)
        inner = flat.get("rope_theta") if isinstance(flat, Mapping) else None
        if theta is None or (facts["file"] != "qwen3" and inner is not None):
            theta = inner
        if scaling is None:
            scaling = flat
    if theta is None:
        raise RefusedError("ValueError: rope_theta is missing from the model config.")
    return number(theta, "rope_theta"), scaling if isinstance(scaling, Mapping) else None


def _ministral(modern: Any) -> tuple[float, Scaling]:
    if not isinstance(modern, Mapping):
        raise RefusedError("TypeError: 'NoneType' object is not subscriptable")
    for key in ("rope_theta", "llama_4_scaling_beta", "original_max_position_embeddings"):
        required(modern, key)
    return number(modern["rope_theta"], "rope_theta"), modern


def _layers(model: Model, facts: Mapping[str, Any], full: Layer) -> dict[str, Layer]:
    """The rotation by the kind that a layer was meant to be; mlx-lm tells kinds by
    sliding_window_pattern, never by layer_types."""
    if not model.nested:
        return {"all": full}
    if facts["file"] == "olmo3":
        theta = number(model.config["rope_theta"], "rope_theta")
        sliding = Layer(formulas.plain(model.head_dim, theta))
        return {kind: sliding if "sliding" in kind else full for kind in model.kinds}
    local = model.config.get("rope_local_base_freq", facts.get("rope_local_base_freq"))
    if local is None:
        return _from_parameters(model, full)
    sliding = Layer(formulas.plain(model.head_dim, number(local, "rope_local_base_freq")))
    every = model.config.get("sliding_window_pattern", facts.get("sliding_window_pattern", 6))
    got: dict[str, Layer] = {}
    for i, kind in enumerate(model.layer_types):
        layer = sliding if (i + 1) % int(number(every, "sliding_window_pattern")) else full
        name = kind
        if kind in got and got[kind] != layer:
            name = f"{kind} (layer {i} and others)"
        got.setdefault(name, layer)
    return got


def _from_parameters(model: Model, full: Layer) -> dict[str, Layer]:
    modern = model.config.get("rope_parameters")
    got = {}
    for kind in model.kinds:
        inner = modern.get(kind) if isinstance(modern, Mapping) else None
        if not isinstance(inner, Mapping) or "rope_theta" not in inner:
            got[kind] = full
            continue
        share = number(inner.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
        head_dim = model.of_kind(kind).head_dim
        whole = inner.get("rope_type") == "proportional"
        dim = head_dim if whole else int(head_dim * share)
        theta = number(inner["rope_theta"], "rope_theta")
        got[kind] = initialize(model, inner, theta, dim, model.max_positions)
    return got


def _switch(model: Model, facts: Mapping[str, Any], scaling: Scaling) -> Switch:
    if not scaling or facts["scaling"] != "initialize":
        return "static"
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    return "length" if kind == "dynamic" and model.max_positions < LOOKED_AT else "static"


def _softmax_scale(model: Model, scaling: Scaling) -> float:
    if not model.mla or not scaling:
        return model.scale
    all_dim = number(scaling.get("mscale_all_dim") or 0, "mscale_all_dim")
    if not all_dim:
        return model.scale
    factor = number(required(scaling, "factor"), "factor")
    return model.scale * formulas.yarn_scale(factor, all_dim) ** 2
