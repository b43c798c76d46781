"""Read what a config says about the attention in any dialect: sizes, kinds of layers, the scale
of the logits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from posenc.runtimes.families import (
    FAMILIES_WITHOUT_ROTATION,
    facts_of_family,
    family_of_class,
    json_table,
    other_architecture,
)
from posenc.runtimes.runtime_facts import Transformers5Facts

INNER_CONFIG_KEYS = ("text_config", "language_config", "llm_config")
"""Where a config of several modalities keeps the language model's."""
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
)
ROTARY_KEYS = json_table("position_keys")["rotary"]
"""Keys about rotation."""
KEYS_OF_LANGUAGE_MODEL = json_table("position_keys")["text_config"]
"""Keys that a config with a language model's own config reads there only."""
ORIGINAL_LENGTH_KEY = "original_max_position_embeddings"
"""The key of the length that a model was trained at before its frequencies were stretched."""
TRAINED_LENGTH_KEY = "posenc_trained_length"
"""Where `posenc extend` keeps the training length if the rope dict's original length must be the
largest one, so that no reader switches."""
KEYS_NOT_LIFTED = ("head_dim", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys that do not reach the language model of a flat config: its class has no such parameter."""
LARGEST_SIZE = 1 << 40
LARGEST_SIZE_OF = {"head_dim": 1 << 14, "qk_rope_head_dim": 1 << 14, "num_hidden_layers": 2000}
"""Bounds of sizes that lists are allocated for; the largest models have a tenth of them."""
LAYER_KINDS = tuple(json_table("position_keys")["layer kinds"])
"""Names by which rope_parameters may be nested."""
LAYER_TYPES_OF_KIND = {
    "main": ("sliding_attention",),
    "compress": ("compressed_sparse_attention", "heavily_compressed_attention"),
}
"""Kind of layers -> the words of layer_types that it stands for, where they are others: DeepSeek
V4 names its rope dicts so."""
CONSTANT_SOFTMAX_SCALES = dict.fromkeys(
    """
    diffusion_gemma_text embedding_gemma2_text gemma3n_text gemma4_text gemma4_unified_text
    gemma4_vision
    """.split(),
    1.0,
)
"""model_type -> the factor of q.k in families that have a constant there, whatever the head is."""


class BadConfigError(ValueError):
    """Sizes in a config that no model can have; raised before any runtime is emulated."""


def language_model_key(config: Mapping[str, Any]) -> str:
    """Return the key under which a file has the config of its language model, such as text_config;
    empty if the file is flat or the family reads no such key."""
    facts = facts_of_family(str(config.get("model_type"))) or {}
    keys = facts.get("inner", INNER_CONFIG_KEYS[:1]) if "text" in facts else ()
    return next((key for key in keys if isinstance(config.get(key), Mapping)), "")


def language_model_key_after_loading(config: Mapping[str, Any]) -> str:
    """Return the key under which transformers has the language model's config after loading, also
    of a flat file; empty for a language model."""
    if key := language_model_key(config):
        return key
    facts = facts_of_family(str(config.get("model_type"))) or {}
    return INNER_CONFIG_KEYS[0] if "text" in facts else ""


def with_language_model_keys_at_top(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the language model's keys and its model_type at the top level.

    Keys for a language model that stand beside its own config are left out, as no runtime reads
    them. A model_type in it that contradicts the family's class becomes one that no family has.
    """
    key = language_model_key(config)
    if not key:
        return dict(config)
    inner_config = config[key]
    model_type = _language_model_family(config, key)
    outer_keys = {k: v for k, v in config.items() if k != key and k not in KEYS_OF_LANGUAGE_MODEL}
    return {**outer_keys, **inner_config, "model_type": model_type}


def _language_model_family(config: Mapping[str, Any], key: str) -> Any:
    """Return the model_type of the language model whose config is under `key`: the one that the
    family's class builds, unless the class takes any."""
    facts = facts_of_family(config["model_type"]) or {}
    written_type = config[key].get("model_type")
    is_known = written_type in FAMILIES_WITHOUT_ROTATION or "transformers5" in (
        facts_of_family(str(written_type)) or {}
    )
    if facts.get("any") and written_type is not None:
        return written_type
    if is_known and written_type != facts["text"]:
        return f"{config['model_type']} with a {key} of {written_type}"  # of which nothing is read
    return facts["text"]


@dataclass(frozen=True)
class Model:
    """The language model that a config describes: what decides the rotation of its layers."""

    config: Mapping[str, Any]
    """config.json with the language model's keys on top."""
    model_type: str
    facts: Mapping[str, Any]
    """The facts of the family, see `families.all_families`, whose keys the docstring of families.py
    defines; empty for a family that posenc does not know."""
    outer_config: Mapping[str, Any] = field(default_factory=dict)
    """config.json where it has the language model's config inside; empty where it is flat."""

    @cached_property
    def transformers5_facts(self) -> Transformers5Facts:
        """Return what is known of the family in transformers 5; defaults where nothing is."""
        return Transformers5Facts.of(self.facts.get("transformers5"))

    @property
    def is_known(self) -> bool:
        """Return True if posenc has facts about the family."""
        return bool(self.facts)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a key of the config under its name or the family's, or the family's default."""
        value = self.config.get(name)
        if value is None:
            value = self.config.get(self.facts.get("names", {}).get(name))
        if value is None:
            value = self.facts.get("defaults", {}).get(name)
        return default if value is None else value

    def size(self, *keys: str, default: int | None = None) -> int:
        """Return the first of these keys that is given, an integer of at least 1.

        Raises: BadConfigError where none is given or one is no such number.
        """
        keys = (*keys, *filter(None, [self.facts.get("names", {}).get(keys[0])]))
        key_found = next((n for n in keys if self.config.get(n) is not None), None)
        value = self.config[key_found] if key_found else self.get(keys[0], default)
        key = key_found or keys[0]
        upper_bound = LARGEST_SIZE_OF.get(keys[0], LARGEST_SIZE)
        if value is None:
            raise BadConfigError(f"config.json: {' or '.join(keys)} is missing.")
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise BadConfigError(f"config.json: {key} must be an integer, got {value!r}.")
        if not 1 <= value <= upper_bound:
            raise BadConfigError(
                f"config.json: {key} must be between 1 and {upper_bound}, got {value}."
            )
        return int(value)

    @property
    def is_mla(self) -> bool:
        """Return True for latent attention as in DeepSeek, whose rotary channels are separate from
        the others."""
        return "kv_lora_rank" in self.config or "qk_rope_head_dim" in self.facts.get("defaults", {})

    @property
    def num_layers(self) -> int:
        """Return the number of layers; 1 where nothing says it."""
        return self.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", default=1)

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.size(self.facts.get("heads", "num_attention_heads"), "n_head", "n_heads")

    @property
    def has_null_head_dim(self) -> bool:
        """Return True if head_dim is null where the class has a number of its own. Some versions of
        the runtimes refuse that, others take different widths."""
        has_own_number = self.is_mla or "head_dim" in self.facts.get("defaults", {})
        return has_own_number and self.config.get("head_dim", 0) is None

    @property
    def head_dim(self) -> int:
        """Return the number of channels of a head that may rotate: all of them, or those of MLA's
        rotary part."""
        if self.is_mla and not self.facts.get("rotates_share"):
            return self.size("qk_rope_head_dim", default=64)
        if self.get("head_dim") is not None and not self.facts.get("even_heads"):
            return self.size("head_dim")
        if self.facts.get("latent_sum"):
            return self.latent_query_width
        hidden_size = self.size(self.facts.get("width", "hidden_size"), "n_embd", "d_model")
        width_per_head = hidden_size * self.facts.get("widening", 1) // self.num_heads
        if not 1 <= width_per_head <= LARGEST_SIZE_OF["head_dim"]:
            sizes_in_words = f"{hidden_size} for {self.num_heads} num_attention_heads"
            raise BadConfigError(
                f"config.json: hidden_size {sizes_in_words} is a head of {width_per_head} channels."
            )
        return width_per_head

    @property
    def required_table_width(self) -> int | None:
        """Return the width that the model's code needs of cos and sin, in channels: a forward pass
        stops at any other.

        None where the code takes any width, and leaves the other channels unrotated.
        """
        facts = self.transformers5_facts
        if self.facts.get("latent_sum"):  # Mistral 4
            return None  # which of its spellings keep the share, is not read
        if facts.dims_key == "qk_rope_head_dim":
            return None  # DeepSeek V4 rotates as many channels as its tables have
        if self.is_mla:  # DeepSeek V2 and V3, and what is built like them
            # Without a head_key, which V3 has, get("") finds nothing.
            rotated_width = self.get(facts.head_key) if self.supports_partial_rotation else None
            return rotated_width or self.size("qk_rope_head_dim", default=64)
        # Towers and families that rotate a share take any width; Mellum and Solar Open read a share
        # and rotate whole heads all the same ("narrows"). All others rotate whole heads.
        has_axes = facts.axes is not None
        if has_axes or (self.supports_partial_rotation and facts.share_use != "narrows"):
            return None
        return self.head_dim

    @property
    def latent_query_width(self) -> int:
        """Return the channels of a query head of MLA: its rotary part and the other one."""
        rotary_width = self.size("qk_rope_head_dim", default=64)
        return self.size("qk_nope_head_dim", default=128) + rotary_width

    @property
    def max_positions(self) -> int:
        """Return the largest length that the config states, else the family's default; 2048, the
        default of LlamaConfig, without either."""
        return self.size(*LENGTH_KEYS, default=2048)

    @property
    def interleaved(self) -> bool:
        """Return True if pairs are (2i, 2i+1) in this family's checkpoints, not (i, i + d/2)."""
        layout_flag = self.config.get(self.facts.get("layout_key", ""))
        return bool(self.facts.get("interleaved") if layout_flag is None else layout_flag)

    @property
    def layout_is_known(self) -> bool:
        """Return False for a family of which nobody has read which channels form a pair."""
        layout_flag = self.config.get(self.facts.get("layout_key", ""))
        return layout_flag is not None or self.facts.get("interleaved") is not None

    @property
    def indexer_is_interleaved(self) -> bool | None:
        """Return True if the indexer of sparse attention has interleaved pairs, which may differ
        from the attention's; None if there is no indexer, or its pairs are not known."""
        return self.facts.get("indexer", {}).get("interleaved")

    @property
    def supports_partial_rotation(self) -> bool:
        """Return True if the family's code reads which fraction of each head rotates."""
        facts = self.transformers5_facts
        if facts.partial_rotary_factor is not None:
            return True
        rope_dicts = [rope_dict for rope_dict in (facts.dicts_by_kind or {}).values() if rope_dict]
        return any("partial_rotary_factor" in d for d in rope_dicts if d["rope_type"] == "default")

    @property
    def rotated_share(self) -> Any:
        """Return the fraction of each head that the config rotates, by whichever key the family has
        for it; None if it has none."""
        facts = self.transformers5_facts
        share = self.config.get(facts.share_key)
        num_rotated = self.config.get(facts.dims_key)
        if share is None and isinstance(num_rotated, int | float):
            share = num_rotated / self.head_dim
        return facts.partial_rotary_factor if share is None else share

    @property
    def theta_of_inner_dict(self) -> Any:
        """Return the rope_theta that the family keeps in a dict of other settings, as DBRX does in
        attn_config; None without one."""
        inner_dict = self.config.get(self.facts.get("theta_in", ""))
        return inner_dict.get("rope_theta") if isinstance(inner_dict, Mapping) else None

    @property
    def has_rope_dict_per_kind(self) -> bool:
        """Return True if the family's code has a rope dict of its own for each kind of layer."""
        return self.transformers5_facts.dicts_by_kind is not None

    @property
    def kinds_of_flat_rope_scaling(self) -> tuple[str, ...] | None:
        """Return the kinds of layers to which a flat rope_scaling applies in a family with a dict
        per kind; () or None where it applies to none, see `Transformers5Facts.flat`."""
        return self.transformers5_facts.flat

    def with_sizes_of_kind(self, kind: str) -> "Model":
        """Return the model with the sizes of one kind of layer, where kinds differ in them: by the
        config's per_layer_config, else by the family's facts; else the model itself."""
        sizes_by_kind = self.facts.get("kind_sizes")
        if sizes_by_kind is None:
            return self
        config_by_layer = self.config.get("per_layer_config")
        sizes_of_kind: Any = None
        if isinstance(config_by_layer, Mapping) and kind in self.layer_types:
            sizes_of_kind = {int(i): v for i, v in config_by_layer.items()}.get(
                self.layer_types.index(kind)
            )
        elif config_by_layer is None:
            # A word is the key that has this kind's size.
            given_sizes = sizes_by_kind.get(kind, {}).items()
            sizes_of_kind = {
                key: self.get(size) if isinstance(size, str) else size for key, size in given_sizes
            }
        if isinstance(sizes_of_kind, Mapping):
            return replace(self, config={**self.config, **sizes_of_kind})
        return self

    @property
    def head_dims_differ(self) -> bool:
        """Return True if kinds of layers differ in their head dimension."""
        return len({self.with_sizes_of_kind(kind).head_dim for kind in self.layer_kinds}) > 1

    @property
    def softmax_scale(self) -> float:
        """Return the factor of q.k in attention, before any temperature of the positions; usually
        1 / sqrt(head_dim)."""
        if self.model_type in CONSTANT_SOFTMAX_SCALES:
            return CONSTANT_SOFTMAX_SCALES[self.model_type]
        if self.is_mla:
            return self.latent_query_width**-0.5
        scalar = self.get("query_pre_attn_scalar")
        if scalar is not None and self.model_type.startswith(("gemma", "vaultgemma", "t5gemma")):
            return float(scalar) ** -0.5
        multiplier = self.get("attention_multiplier")
        if multiplier is not None and self.model_type.startswith("granite"):
            return float(multiplier)
        return (self.head_dim / self.facts.get("widening", 1)) ** -0.5

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Return the kind of each layer, as transformers 5 derives it.

        The family's `layers` say it where the config lists none. cycle: the kinds of layers 0, 1,
        ..., again and again. every: the key of another period, with one full-attention layer in it.
        first: the kinds of the first layers instead. full_before: the key of how many first layers
        are full-attention ones, after which the cycle starts. last: the kind of the last layer;
        forced: whatever the config lists. renamed: kinds under older names.
        """
        kinds_rule = self.facts.get("layers", {})
        listed_types = self.get("layer_types")
        is_listed = isinstance(listed_types, list) and bool(listed_types)
        if is_listed:
            new_names = {} if "per_layer_config" in self.config else kinds_rule.get("renamed", {})
            kinds = [new_names.get(str(kind), str(kind)) for kind in listed_types]
        else:
            kinds_by_code = self._kinds_by_code
            kinds = self._kinds_by_rule if kinds_by_code is None else kinds_by_code
        if "last" in kinds_rule and (kinds_rule.get("forced") or not is_listed):
            kinds[-1] = kinds_rule["last"]
        return tuple(kinds)

    @property
    def _kinds_by_code(self) -> list[str] | None:
        """Return the kinds of the layers by the family's list of codes; None where it has none."""
        for key, kinds_of_codes in self.facts.get("layer_codes", {}).items():
            codes = self.config.get(key)
            if not isinstance(codes, list):
                continue
            if unknown_codes := [code for code in codes if str(code) not in kinds_of_codes]:
                raise BadConfigError(
                    f"config.json: {key} has {unknown_codes[0]!r}, expected "
                    f"{', '.join(kinds_of_codes)}."
                )
            return [kinds_of_codes[str(code)] for code in codes[: self.num_layers]]
        return None

    @property
    def _kinds_by_rule(self) -> list[str]:
        """Return the kind of each layer by the family's rule, for a config that lists none."""
        kinds_rule, num_layers = self.facts.get("layers", {}), self.num_layers
        first_kinds, num_first = list(kinds_rule.get("first", ())), 0
        if "full_before" in kinds_rule and self.config.get(kinds_rule["full_before"]) is not None:
            num_first = self.size(kinds_rule["full_before"])
            first_kinds = ["full_attention"] * num_first
        cycle = self._alternating_kinds
        kinds = [cycle[(i - num_first) % len(cycle)] for i in range(num_layers)]
        kinds[: len(first_kinds)] = first_kinds[:num_layers]
        return kinds

    @property
    def _alternating_kinds(self) -> list[str]:
        """Return the kinds of layers of one period, which is repeated: the config's period where it
        has one (a class asks whether i % period is 0, whatever its sign), else the family's."""
        kinds_rule = self.facts.get("layers", {})
        cycle = list(kinds_rule.get("cycle", ["full_attention"]))
        period = self.config.get(kinds_rule.get("every", ""))
        if not isinstance(period, int) or period == 0:
            return cycle
        windowed = [kind for kind in cycle if kind != "full_attention"][:1] * (abs(period) - 1)
        starts_full = cycle[0] == "full_attention"
        full = ["full_attention"]
        return full + windowed if starts_full else windowed + full

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kinds of layers that rotate differently: ("all",) where all rotate alike."""
        if not self.has_rope_dict_per_kind:
            return ("all",)
        kinds = tuple(self.transformers5_facts.dicts_by_kind or ())
        present_kinds = [kind for kind in kinds if self.layers_of_kind(kind)]
        return tuple(present_kinds) or kinds

    def layers_of_kind(self, kind: str) -> tuple[int, ...]:
        """Return the layers of a kind, whether they rotate or not."""
        if kind == "all":
            return tuple(range(self.num_layers))
        types = LAYER_TYPES_OF_KIND.get(kind, (kind,))
        return tuple(i for i, layer_type in enumerate(self.layer_types) if layer_type in types)

    @property
    def without_rotation(self) -> tuple[int, ...]:
        """Return the layers that do not rotate, by the config's keys and the family's `rotates`."""
        every_layer = tuple(range(self.num_layers))
        conditions = self.facts.get("rotates", {}).get("when", {})
        if any(self.get(key) != value for key, value in conditions.items()):
            return every_layer
        if self.config.get("no_rope_layer_interval") is not None:
            self.size("no_rope_layer_interval")  # no impossible number passes in any family
        for layers_by_rule in (
            _layers_with_zero_flag,
            _last_layer_of_each_period,
            _layers_without_base,
            _every_nth_layer_from_last,
        ):
            unrotated_layers = layers_by_rule(self)
            if unrotated_layers is not None:
                return unrotated_layers
        return tuple(
            sorted(_layers_of_kinds_without_rotation(self) | _layers_with_null_rope_dict(self))
        )


def _layers_with_zero_flag(model: Model) -> tuple[int, ...] | None:
    """Return the layers with a 0 or false in the family's list of which layers rotate; None where
    the config has no such list, or an empty one.

    `rotates`: list, the key of the config that has the list.
    """
    flags = model.config.get(model.facts.get("rotates", {}).get("list", ""))
    if not isinstance(flags, list) or not flags:
        return None
    return tuple(i for i, rotates in enumerate(flags) if not rotates)


def _last_layer_of_each_period(model: Model) -> tuple[int, ...] | None:
    """Return the last layer of every n layers; None in families without such a period.

    The family's `rotates` names the key of the config that has n, `every`, and a `default`.
    """
    rule = model.facts.get("rotates", {})
    if "every" not in rule:
        return None
    period = model.size(rule["every"], default=rule["default"])
    return tuple(i for i in range(model.num_layers) if (i + 1) % period == 0)


def _layers_without_base(model: Model) -> tuple[int, ...] | None:
    """Return the layers whose base is 0 or null; None where the config lists no bases.

    The family's `rotates` names the key of the config that has a base for each layer, `zeros`.
    """
    bases = model.config.get(model.facts.get("rotates", {}).get("zeros", ""))
    if not isinstance(bases, list):
        return None
    return tuple(i for i, theta in enumerate(bases) if not theta)


def _every_nth_layer_from_last(model: Model) -> tuple[int, ...] | None:
    """Return every n-th layer from the last one back, the last one included; None in families
    without such a period.

    The family's fact `rotates` has n as its `counted_back`; no key of a config changes it.
    """
    period = model.facts.get("rotates", {}).get("counted_back")
    if period is None:
        return None
    last = model.num_layers - 1
    return tuple(i for i in range(model.num_layers) if (last - i) % period == 0)


def _layers_of_kinds_without_rotation(model: Model) -> set[int]:
    """Return the layers of kinds that do not rotate.

    Words of `rotates`:
    - only: the kinds of layer that rotate.
    - unless_null: the name of a config key; where the config has null there, all layers rotate.
    - first: the name of a config key; its value is how many layers, from the first on, rotate
      whatever their kind.
    """
    rule = model.facts.get("rotates", {})
    if "only" not in rule or model.config.get(rule.get("unless_null", ""), 0) is None:
        return set()
    num_first = model.config.get(rule.get("first", "")) or 0
    indexed_kinds = enumerate(model.layer_types)
    return {i for i, kind in indexed_kinds if kind not in rule["only"] and i >= num_first}


def _layers_with_null_rope_dict(model: Model) -> set[int]:
    """Return the layers of kinds with null for a rope dict, in the config or, where that has no
    dicts, in the class; none in families that apply a flat rope dict to some kind.

    The family's facts of transformers 5 have the class's dicts by kind of layer (`own_dicts`) and
    the kinds to which a flat dict applies (`flat`).
    """
    if not model.has_rope_dict_per_kind or model.kinds_of_flat_rope_scaling:
        return set()
    older_dict = model.config.get("rope_scaling")
    newer_dict = model.config.get("rope_parameters")
    dict_by_kind = newer_dict or older_dict or model.transformers5_facts.dicts_by_kind
    if not isinstance(dict_by_kind, Mapping):
        return set()
    unrotated_layers: set[int] = set()
    for kind in model.layer_kinds:
        if dict_by_kind.get(kind, 0) is None:
            unrotated_layers.update(model.layers_of_kind(kind))
    return unrotated_layers


def _family_of_class(architectures: Any) -> str:
    """Return the model_type of the first class in architectures; empty if it is not known."""
    if not isinstance(architectures, list) or not architectures:
        return ""
    return family_of_class(str(architectures[0])) or ""


def model_of(config: Mapping[str, Any]) -> Model:
    """Return the model that a config.json describes."""
    flat_config = with_language_model_keys_at_top(config)
    model_type = flat_config.get("model_type")
    if not isinstance(model_type, str):
        model_type = _family_of_class(flat_config.get("architectures"))
    facts = facts_of_family(model_type) or {}
    if other_architecture(flat_config, model_type):
        return Model(flat_config, model_type, {})
    if "text" in facts:  # of several modalities, without a config of the language model's
        if not facts.get("may_be_flat") or config.get("text_config") is not None:
            return Model(flat_config, model_type, {})
        model_type = facts["text"]
        facts = facts_of_family(model_type) or {}
        flat_config = {k: v for k, v in flat_config.items() if k not in KEYS_NOT_LIFTED}
    return Model(flat_config, model_type, facts, config if language_model_key(config) else {})
