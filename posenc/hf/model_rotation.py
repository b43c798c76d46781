"""Read and change the rotation of a loaded model, only through its config, so that an export
computes the same."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posenc.hf.checkpoint.loading import language_model_of, text_config_of
from posenc.hf.rope_settings import RopeSetting, write_settings
from posenc.hf.transformers_compat import validate_config

_CHANGED_CONFIG_KEYS = (
    "rope_parameters",
    "max_position_embeddings",
    "original_max_position_embeddings",
)


def rotary_modules(model: Any) -> list[tuple[nn.Module, str, Any]]:
    """Return (parent, name, module) of each rotary module of a transformers model: `module` is the
    attribute `name` of the module `parent`. Those of a part for images are left out."""
    return [
        (parent, name, child)
        for parent in language_model_of(model).modules()
        for name, child in parent.named_children()
        if "RotaryEmbedding" in type(child).__name__
    ]


def rebuild_rotary_modules(model: Any) -> int:
    """Rebuild the rotary modules from the model's config; return their number."""
    count = 0
    for parent, name, child in rotary_modules(model):
        if hasattr(child, "config"):
            device = next(child.buffers()).device
            setattr(parent, name, type(child)(child.config).to(device))
            count += 1
    return count


def configured_score_scales(model: Any) -> dict[Any, float]:
    """Return, by module, the score scale that each attention module would get if it were built from
    the current config. DeepSeek's reads mscale_all_dim only when it is built."""
    scales: dict[Any, float] = {}
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), float) and hasattr(module, "layer_idx"):
            with torch.device("meta"):
                scales[module] = type(module)(module.config, layer_idx=module.layer_idx).scaling
    return scales


def _set_score_scales(scales: Mapping[Any, float]) -> None:
    """Set the score scale of attention modules. scales: the factor of q @ k for each module."""
    for module, scale in scales.items():
        module.scaling = scale


class Rotation:
    """Hold a copy of a model's rotary modules and score scales, which can be put back while the
    model has others."""

    def __init__(self, model: Any) -> None:
        # A module reads its config while it runs, so its copy has a copy of that, too.
        self.modules = [
            (parent, name, copy.deepcopy(module)) for parent, name, module in rotary_modules(model)
        ]
        self.score_scales = {
            module: module.scaling
            for module in model.modules()
            if isinstance(getattr(module, "scaling", None), float)
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model rotate as it did when it was copied, inside the block."""
        modules_before = [(parent, name, getattr(parent, name)) for parent, name, _ in self.modules]
        scales_before = {module: module.scaling for module in self.score_scales}
        try:
            for parent, name, module in self.modules:
                setattr(parent, name, module)
            _set_score_scales(self.score_scales)
            yield
        finally:
            for parent, name, module in modules_before:
                setattr(parent, name, module)
            _set_score_scales(scales_before)


def rotary_frequencies(model: Any) -> dict[str | None, tuple[Tensor, float]]:
    """Return inv_freq (pairs) and attention factor of the rotation for each layer type; the key is
    None for all layers. Where several modules have one layer type, the last is taken; see
    `distinct_frequencies`."""
    return dict(_iterate_frequencies(model))


def distinct_frequencies(model: Any) -> dict[str | None, list[tuple[Tensor, float]]]:
    """Return inv_freq and attention factor of each different rotation, by layer type (None: all
    layers). Modules of one layer type may rotate differently; `rotary_frequencies` returns only the
    last."""
    rotations: dict[str | None, list[tuple[Tensor, float]]] = {}
    for layer_type, (inv_freq, attention_factor) in _iterate_frequencies(model):
        rotations_of_type = rotations.setdefault(layer_type, [])
        is_known = any(
            torch.equal(inv_freq, other_inv_freq) and attention_factor == other_factor
            for other_inv_freq, other_factor in rotations_of_type
        )
        if not is_known:
            rotations_of_type.append((inv_freq, attention_factor))
    return rotations


def _iterate_frequencies(model: Any) -> Iterator[tuple[str | None, tuple[Tensor, float]]]:
    """Yield layer type, inv_freq and attention factor of each rotation of each rotary module."""
    for _, _, module in rotary_modules(model):
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                layer_type = name.removesuffix("inv_freq").removesuffix("_") or None
                attention_factor = getattr(
                    module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling"
                )
                yield layer_type, (buffer, float(attention_factor))


def frequencies_differ(model: Any, settings: tuple[RopeSetting, ...]) -> bool:
    """Return True if the model's frequencies differ from those of the settings, or are NaN."""
    current_frequencies = rotary_frequencies(model)
    return any(
        not matches_setting(setting, *current_frequencies[setting.layer_type])
        for setting in settings
        if setting.layer_type in current_frequencies
    )


def matches_setting(setting: RopeSetting, inv_freq: Tensor, attention_factor: float) -> bool:
    """Return True if a rotary module's frequencies and attention factor are those of the setting.

    inv_freq: (pairs), in radians per token. attention_factor: the factor of cos and sin.
    """
    frequencies = setting.frequencies()
    expected = torch.tensor([float(f) for f in frequencies.inv_freq], dtype=torch.float64)
    actual = inv_freq.detach().double().cpu()
    return (
        actual.shape == expected.shape
        # Far above the rounding of float32, in which modules compute frequencies.
        and torch.allclose(actual, expected, rtol=1e-5, atol=1e-12)
        and abs(attention_factor / frequencies.attention_factor - 1) <= 1e-5
    )


def _refuse_invalid_config(config: Any) -> None:
    """Check the config as transformers does when it loads one.

    Raises: ValueError if transformers would not load it.
    """
    try:
        validate_config(config)
    except Exception as error:  # each family has checks of its own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise ValueError(
            f"transformers would not load a {config.model_type} config with these rotary keys "
            f"({reason})"
        ) from error


@contextmanager
def settings_applied(
    model: Any, settings: tuple[RopeSetting, ...], max_positions: int
) -> Iterator[nn.Module]:
    """Write settings to the model's config and rebuild its rotation inside the block; restore both
    after.

    Raises: ValueError if the model's code refuses them.
    """
    config: Any = text_config_of(model.config)
    values_before = {
        name: copy.deepcopy(getattr(config, name))
        for name in _CHANGED_CONFIG_KEYS
        if hasattr(config, name)
    }
    changes_score_scales = any(s.mscale_all_dim for s in settings)
    scales = configured_score_scales(model) if changes_score_scales else {}
    try:
        write_settings(config, settings, max_positions)
        _refuse_invalid_config(config)
        rebuild_rotary_modules(model)
        if changes_score_scales:
            _set_score_scales(configured_score_scales(model))
        if frequencies_differ(model, settings):
            raise ValueError(
                f"the code of a {config.model_type} model does not take these frequencies from its "
                "config"
            )
        yield model
    finally:
        for name, value in values_before.items():
            setattr(config, name, value)
        rebuild_rotary_modules(model)
        _set_score_scales(scales)


def attentions_with_rope_switch(model: Any) -> list[Any]:
    """Return the attention modules that have a switch for their rotation, `use_rope`; empty if the
    config has no no_rope_layers to set them from."""
    if not getattr(model.config, "no_rope_layers", None):
        return []
    return [module for module in model.modules() if hasattr(module, "use_rope")]


@contextmanager
def rotation_dropped(model: Any, max_positions: int) -> Iterator[nn.Module]:
    """Let no layer rotate inside the block, by the config's no_rope_layers and the modules' own
    switches, with a new maximum length in tokens; restore all after."""
    config = model.config
    attentions = attentions_with_rope_switch(model)
    values_before = [config.no_rope_layers, config.max_position_embeddings]
    switches_before = [attention.use_rope for attention in attentions]
    try:
        config.no_rope_layers = [0] * len(attentions)  # 1 for a layer that rotates
        config.max_position_embeddings = max_positions
        for attention in attentions:
            attention.use_rope = 0
        yield model
    finally:
        config.no_rope_layers, config.max_position_embeddings = values_before
        for attention, use_rope in zip(attentions, switches_before, strict=True):
            attention.use_rope = use_rope
