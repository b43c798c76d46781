"""Find where a model keeps its positions, with which settings, and what they look like."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from posenc.hf import learned_tables
from posenc.hf.checkpoint.loading import Checkpoint, text_config_of
from posenc.hf.model_rotation import distinct_frequencies, matches_setting, rotary_modules
from posenc.hf.rope_settings import RopeSetting, head_dim_of
from posenc.machine.fingerprint import installed_version

TABLE_NAMES = ("position_embeddings", "wpe", "embed_positions")
"""Names of absolute position tables in transformers' families."""
DISENTANGLED_METHODS = ("disentangled_attention_bias", "disentangled_att_bias")
"""Methods of DeBERTa-v2 and DeBERTa that add position to the scores."""
FIXED_ROTATIONS = ("gptj", "codegen")
"""Families that rotate interleaved pairs, by a table of sines in every layer."""
_GPTJ_BASE = 10000.0
"""The base of FIXED_ROTATIONS in transformers' code."""
SHOWN_DISTANCE = 128
"""Farthest distance of the biases drawn, and about the rows of a table; chosen, not derived."""


@dataclass(frozen=True)
class Rotation:
    """Rotary settings of one kind of layer.

    layers: those that rotate so, as "all layers". rope_theta: None if the frequencies are those of
    no base. rotary_dim, head_dim: channels of a head that rotate, and all of them.
    scaling: its class name, "none" without one. trained: the training length before any extension,
    in tokens. longest: the length that the config allows. wavelengths: tokens per turn of each pair
    of channels at the length `longest`; None for a pair that does not rotate. unscaled: the same
    without the scaling, as in the training on `trained` tokens. differs: a sentence if the model's
    rotary module, which is described here, rotates otherwise than the config says; else "".
    """

    layers: str
    rope_theta: float | None
    rotary_dim: int
    head_dim: int
    scaling: str
    trained: int
    longest: int
    wavelengths: list[float | None]
    unscaled: list[float | None]
    differs: str = ""
    unfinished: list[int] = field(init=False)
    """Pairs that complete no turn within the training length."""
    new_angles: list[int] = field(init=False)
    """Unfinished pairs that reach angles beyond those of training: at the longest length that
    the config allows, or at twice the training length if both are the same."""

    def __post_init__(self) -> None:
        slow_pairs = [
            pair
            for pair, wavelength in enumerate(self.unscaled)
            if wavelength is None or wavelength > self.trained
        ]
        object.__setattr__(self, "unfinished", slow_pairs)
        new_pairs = [
            pair
            for pair in slow_pairs
            if self._turns(self.beyond, pair) > self._trained_turns(pair)
        ]
        object.__setattr__(self, "new_angles", new_pairs)

    @property
    def beyond(self) -> int:
        """Return the length in tokens up to which `new_angles` counts."""
        return self.longest if self.longest > self.trained else 2 * self.trained

    def _turns(self, length: int, pair: int) -> float:
        """Return how many turns a pair makes in `length` tokens; 0 for one that does not rotate."""
        wavelength = self.wavelengths[pair]
        return 0.0 if wavelength is None else length / wavelength

    def _trained_turns(self, pair: int) -> float:
        """Return how many turns the pair made in training, times 1 + 1e-9, so that a rounding error
        does not count as a new angle."""
        wavelength = self.unscaled[pair]
        return 0.0 if wavelength is None else self.trained / wavelength * (1 + 1e-9)


@dataclass(frozen=True)
class MeasuredTable:
    """A learned table of absolute positions.

    where: its path in the model. rows: number of positions. reserved: number of rows before the
    first position. neighbours: mean cosine of one row with the next. norms: smallest, mean and
    largest length of a row. similarity: cosine of every `step`-th row with every other of them,
    about `SHOWN_DISTANCE` rows and as many columns.
    """

    where: str
    rows: int
    reserved: int
    neighbours: float
    norms: tuple[float, float, float]
    step: int
    similarity: list[list[float]]


@dataclass(frozen=True)
class Bias:
    """A bias on the scores that depends only on the distance.

    where: where it acts, a module's name or words. settings: its kind and arguments, in words.
    values: (heads, distances) in logits, as the model computes it. distances: query position minus
    key position, one for each column. slopes: logits per token, one for each head, of a bias that
    is a line; None for others.
    """

    where: str
    settings: str
    distances: list[int]
    values: list[list[float]]
    slopes: list[float] | None = None


@dataclass(frozen=True)
class Disentangled:
    """DeBERTa's table of relative positions, whose scores depend on the content too.

    values: as in Bias, but the mean over the sentence in the first layer; filled in after a run.
    """

    where: str
    settings: str
    distances: list[int] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)

    def with_means(self, scores: Tensor) -> "Disentangled":
        """Return a copy with the mean scores of a sentence, from scores (heads, length, length)."""
        max_distance = scores.shape[-1] - 1
        distances = list(range(-max_distance, max_distance + 1))
        means = torch.stack([scores.diagonal(-d, -2, -1).mean(-1) for d in distances], dim=-1)
        return replace(self, distances=distances, values=means.tolist())


PositionSource = Rotation | MeasuredTable | Bias | Disentangled
"""A part of a model that gives it positions."""


@torch.no_grad()
def find_positions(checkpoint: Checkpoint) -> list[PositionSource]:
    """Return everything that gives the model positions; empty if nothing known was found.

    A rotation is described as the model's rotary modules compute it, even if the config says
    otherwise.

    Raises: ValueError if the frequencies of the modules follow from no known setting.
    """
    model = checkpoint.model
    return [
        *_rotations(checkpoint),
        *_tables_and_t5_biases(model),
        *_fixed_rotations(model),
        *_alibi_biases(model),
        *_disentangled_tables(model),
    ]


def _tables_and_t5_biases(model: Any) -> Iterator[MeasuredTable | Bias]:
    """Yield the tables of absolute positions, and T5's and MPNet's of relative ones, in the order
    of modules."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TABLE_NAMES and isinstance(module, nn.Embedding):
            yield _position_table(name, module, model)
        if not hasattr(module, "relative_attention_bias"):
            continue
        if hasattr(module, "compute_bias"):
            yield from _t5_biases(name, module)
        elif hasattr(module, "compute_position_bias"):
            yield _mpnet_bias(name, module)


def _fixed_rotations(model: Any) -> Iterator[Rotation]:
    """Yield the rotation of GPT-J or CodeGen, whose configs do not describe it."""
    config = text_config_of(model.config)
    if config.model_type in FIXED_ROTATIONS:
        rotary_dim = config.rotary_dim or config.hidden_size // config.num_attention_heads
        longest = config.max_position_embeddings
        yield _rotation_of_setting(RopeSetting(None, _GPTJ_BASE, rotary_dim, None, longest), model)


def _alibi_biases(model: Any) -> Iterator[Bias]:
    """Yield ALiBi's bias and its slopes, as the model computes them; nothing without ALiBi."""
    values = alibi_by_distance(model, SHOWN_DISTANCE + 1)
    if values is None:
        return
    slopes = (-values[:, 1]).tolist()
    distances = list(range(values.shape[-1]))
    slopes_in_words = f"slopes {', '.join(f'{slope:.3g}' for slope in slopes)}"
    yield Bias("scores of every layer", slopes_in_words, distances, values.tolist(), slopes)


def _disentangled_tables(model: Any) -> Iterator[Disentangled]:
    """Yield DeBERTa's table of relative positions; nothing for other models."""
    config = text_config_of(model.config)
    if not getattr(config, "relative_attention", False):
        return
    table = next(m for name, m in model.named_modules() if name.endswith("rel_embeddings"))
    settings_in_words = f"{table.weight.shape[0]} rows for relative positions"
    num_buckets = getattr(config, "position_buckets", -1)
    if num_buckets > 0:
        settings_in_words += f", {num_buckets} buckets each way"
    score_terms_in_words = ", ".join(config.pos_att_type or ()) or "none"  # such as c2p, p2c
    yield Disentangled("scores of every layer", f"{settings_in_words}; {score_terms_in_words}")


def _rotations(checkpoint: Checkpoint) -> Iterator[Rotation]:
    """Yield the rotations that the model's rotary modules have.

    Raises: ValueError if their frequencies follow from no known setting.
    """
    model = checkpoint.model
    setting_by_layer_type = {s.layer_type: s for s in checkpoint.rope_settings}
    rotations_by_layer_type = (
        distinct_frequencies(_text_part(model)) if setting_by_layer_type else {}
    )
    for layer_type, rotations in rotations_by_layer_type.items():
        setting = setting_by_layer_type.get(layer_type)
        if setting is None or len(rotations) > 1:
            raise ValueError(_unknown_frequencies_message(checkpoint))
        ((inv_freq, attention_factor),) = rotations
        yield _rotation_of_module(checkpoint, setting, inv_freq, attention_factor)


def _text_part(model: Any) -> Any:
    """Return the part of the model that reads text: its decoder, or the whole model if the decoder
    has no rotary module, as for ModernBERT, whose get_decoder() returns its last linear layer."""
    decoder = model.get_decoder()
    return decoder if rotary_modules(decoder) else model


def _rotation_of_module(
    checkpoint: Checkpoint, setting: RopeSetting, inv_freq: Tensor, attention_factor: float
) -> Rotation:
    """Return the rotation of a rotary module.

    setting: what the config says. inv_freq: the module's own, (pairs), in radians per token.
    attention_factor: the module's factor of cos and sin.

    Raises: ValueError if the module's frequencies are neither those of the setting, nor those of
    the setting with as many pairs as the module has, nor unscaled ones.
    """
    model = checkpoint.model
    if matches_setting(setting, inv_freq, attention_factor):
        return _rotation_of_setting(setting, model)
    num_pairs = len(inv_freq)
    differs_template = (
        f"The config says {_setting_in_words(setting)}; the model's rotary module has {{}}."
    )
    setting_with_pairs = replace(setting, rotary_dim=2 * num_pairs)
    if matches_setting(setting_with_pairs, inv_freq, attention_factor):
        return replace(
            _rotation_of_setting(setting_with_pairs, model),
            differs=differs_template.format(_setting_in_words(setting_with_pairs)),
        )
    is_scaled = setting.scaling is not None or setting.compression != 1.0
    if is_scaled or attention_factor != 1.0 or not inv_freq.isfinite().all():
        raise ValueError(_unknown_frequencies_message(checkpoint))
    wavelengths = _wavelengths(inv_freq.double())
    base = _base_of_frequencies(inv_freq.double())
    theta_in_words = "frequencies of no theta" if base is None else f"theta {base:,.6g}"
    return replace(
        _rotation_of_setting(setting_with_pairs, model),
        rope_theta=base,
        wavelengths=wavelengths,
        unscaled=wavelengths,
        differs=differs_template.format(f"{num_pairs} pairs, {theta_in_words}"),
    )


def _setting_in_words(setting: RopeSetting) -> str:
    """Return pairs, base and scaling of a setting as text: "32 pairs, theta 10,000, scaling
    YaRN"."""
    scaling_clause = "" if setting.scaling_name == "none" else f", scaling {setting.scaling_name}"
    return f"{setting.rotary_dim // 2} pairs, theta {setting.rope_theta:,.6g}{scaling_clause}"


def _base_of_frequencies(inv_freq: Tensor) -> float | None:
    """Return the theta whose frequencies theta^(-i / pairs) these are; None if there is none."""
    num_pairs = len(inv_freq)
    if num_pairs < 2 or not inv_freq[-1] > 0:
        return None
    base = float(inv_freq[-1]) ** (-num_pairs / (num_pairs - 1))
    exact_frequencies = base ** (-torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    return base if torch.allclose(inv_freq, exact_frequencies, rtol=1e-5, atol=0.0) else None


def _unknown_frequencies_message(checkpoint: Checkpoint) -> str:
    """Return the sentence that refuses a model whose own frequencies follow from no known
    setting."""
    return (
        f"{checkpoint.folder}: a {checkpoint.config.model_type} model of transformers "
        f"{installed_version('transformers')} rotates by other frequencies than its rotary keys "
        "say, so that nothing can be said about its positions. Another release may follow them."
    )


def _rotation_of_setting(setting: RopeSetting, model: Any) -> Rotation:
    """Return the rotation that a setting of the config describes, at the longest length allowed."""
    config = text_config_of(model.config)
    longest = config.max_position_embeddings
    unscaled_setting = replace(setting, scaling=None)
    return Rotation(
        layers=_rotating_layers(setting, config),
        rope_theta=setting.rope_theta,
        rotary_dim=setting.rotary_dim,
        head_dim=head_dim_of(config, setting.layer_type),
        scaling=setting.scaling_name,
        trained=setting.original_length,
        longest=longest,
        wavelengths=_wavelengths(setting.frequencies(longest).inv_freq),
        unscaled=_wavelengths(unscaled_setting.frequencies().inv_freq),
    )


def _rotating_layers(setting: RopeSetting, config: Any) -> str:
    """Return which layers rotate by the setting, in words: "full_attention layers", "all layers",
    or "24 of 32 layers" where the config's no_rope_layers says that some do not rotate."""
    if setting.layer_type is not None:
        return f"{setting.layer_type} layers"
    rotation_flags = getattr(config, "no_rope_layers", None)  # 1 for a layer that does
    if not rotation_flags or all(rotation_flags):
        return "all layers"
    return f"{sum(map(bool, rotation_flags))} of {len(rotation_flags)} layers"


def _wavelengths(inv_freq: Any) -> list[float | None]:
    """Return the tokens that each pair takes for a turn; None for one that does not rotate."""
    return [2 * math.pi / float(f) if float(f) else None for f in inv_freq]


def _position_table(name: str, module: nn.Embedding, model: Any) -> MeasuredTable:
    """Return the description of a table of absolute positions, measured on its weights without the
    reserved rows.

    name: the table's path in the model. module: the table.
    """
    table = learned_tables.position_table(model)
    num_reserved_rows = table.num_offset_rows if table is not None and table.module is module else 0
    rows = module.weight[num_reserved_rows:].double()
    norms = rows.norm(dim=-1)
    unit_rows = rows / norms.clamp(min=1e-30)[:, None]  # a row of zeros stays
    step = max(1, len(rows) // SHOWN_DISTANCE)
    sampled_rows = unit_rows[::step]
    return MeasuredTable(
        where=name,
        rows=len(rows),
        reserved=num_reserved_rows,
        neighbours=(unit_rows[1:] * unit_rows[:-1]).sum(-1).mean().item(),
        norms=(norms.min().item(), norms.mean().item(), norms.max().item()),
        step=step,
        similarity=(sampled_rows @ sampled_rows.mT).tolist(),
    )


def _t5_biases(name: str, attention: Any) -> list[Bias]:
    """Return T5's bias by distance, in a list; an empty list for a layer that takes its bias from
    another.

    name: the path of the layer's attention in the model. attention: that module.
    """
    if not attention.has_relative_attention_bias:
        return []
    length = SHOWN_DISTANCE + 1
    bias_matrix = attention.compute_bias(length, length)[0]
    first_distance = 0 if attention.is_decoder else -SHOWN_DISTANCE
    distances = list(range(first_distance, SHOWN_DISTANCE + 1))
    values = torch.stack([bias_matrix.diagonal(-d, -2, -1)[..., 0] for d in distances], dim=-1)
    settings_in_words = (
        f"{attention.relative_attention_num_buckets} buckets, the last for distances from "
        f"{attention.relative_attention_max_distance} on, "
        f"{'past only' if attention.is_decoder else 'both ways'}"
    )
    return [Bias(name, settings_in_words, distances, values.tolist())]


def _mpnet_bias(name: str, encoder: Any) -> Bias:
    """Return MPNet's bias by distance, which all layers share: T5's buckets in both directions.

    name: the path of the encoder in the model. encoder: that module.
    """
    table = encoder.relative_attention_bias.weight
    hidden_states = table.new_zeros(1, SHOWN_DISTANCE + 1, 1)  # only its length is read
    bias_matrix = encoder.compute_position_bias(hidden_states)[0]
    distances = list(range(-SHOWN_DISTANCE, SHOWN_DISTANCE + 1))
    values = torch.stack([bias_matrix.diagonal(-d, -2, -1)[..., 0] for d in distances], dim=-1)
    settings_in_words = f"{len(table)} buckets, both ways, for all layers"
    return Bias(f"{name}.relative_attention_bias", settings_in_words, distances, values.tolist())


def alibi_by_distance(model: Any, length: int) -> Tensor | None:
    """Return the bias in logits, (heads, length), relative to the key at the query's own position;
    None for a model without one.

    Raises: ValueError for Falcon with ALiBi, whose bias transformers (5.23) counts twice in the
        eager implementation, the only one that shows attention: in the mask and in the scores.
    """
    if model.config.model_type == "falcon" and model.config.alibi:
        raise ValueError(
            "Falcon with ALiBi: transformers adds its bias twice if it returns attention, so a "
            "figure would not show what the model does."
        )
    num_heads = text_config_of(model.config).num_attention_heads
    for module in model.modules():
        if hasattr(module, "build_alibi_tensor"):
            bias = module.build_alibi_tensor(torch.ones(1, length), num_heads, torch.float32)
        elif hasattr(module, "build_mpt_alibi_tensor"):
            bias = module.build_mpt_alibi_tensor(num_heads, length)
        else:
            continue
        bias = bias.view(num_heads, length)
        # The last key stands at the query's own position; flipped, distances count from there.
        return (bias - bias[:, -1:]).flip(-1)
    return None
