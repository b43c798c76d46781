"""The config.json of an extended checkpoint: rotary keys in both dialects, and what changed."""

from __future__ import annotations

from typing import Any

from posenc.hf.rope_config_write import FEW_WORDS

LONGEST_LAYERS = "full_attention"
"""Of two kinds of layers, the one that older configs describe by rope_theta and rope_scaling."""


def exported_config(saved: dict[str, Any]) -> dict[str, Any]:
    """config.json for tools old and new.

    transformers 5 reads rope_parameters; transformers 4, and much that was written beside it, reads
    rope_theta and rope_scaling, and would run the plain rotation without a word where only the new
    keys stand. Where both stand, transformers 5 takes rope_scaling: both say the same.

    Args:
        saved: config.json as transformers 5 writes it.
    """
    config = {k: v for k, v in saved.items() if k not in ("rope_scaling", "rope_theta")}
    config.pop("auto_map", None)  # the code that it names is not in the new folder
    parameters = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        sliding = parameters.get("sliding_attention")
        if LONGEST_LAYERS not in parameters or set(parameters) - {LONGEST_LAYERS} - {
            "sliding_attention"
        }:
            return config  # no older tool knows such a model
        if sliding:
            config["rope_local_base_freq"] = sliding["rope_theta"]
        parameters = parameters[LONGEST_LAYERS]
    if not parameters:
        return config
    config["rope_theta"] = parameters["rope_theta"]
    if "partial_rotary_factor" in parameters and parameters["rope_type"] != "proportional":
        config["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    if config.get("model_type") == "gpt_neox":  # has words of its own
        config["rotary_emb_base"] = parameters["rope_theta"]
        config["rotary_pct"] = parameters.get("partial_rotary_factor", 1.0)
    if parameters["rope_type"] != "default" and config.get("model_type") not in FEW_WORDS:
        # Those take a rope_scaling of three keys there, which would drop the temperature here.
        scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
        config["rope_scaling"] = {**scaling, "type": scaling["rope_type"]}
    return config
