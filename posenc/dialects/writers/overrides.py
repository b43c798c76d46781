"""Find the command-line options with which a server computes what was meant, without changing
files."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from posenc.dialects.computed import Computed
from posenc.dialects.meaning import Meaning
from posenc.dialects.model import flatten, model_of
from posenc.dialects.runtimes import RUNTIMES
from posenc.dialects.writers import dual
from posenc.dialects.writers.candidates import candidates, largest
from posenc.dialects.writers.proof import disagreement

SERVERS = {
    "vllm": ("--hf-overrides", "--max-model-len"),
    "sglang": ("--json-model-override-args", "--context-length"),
}
"""The options of each for a config, and for the longest sequence."""


def override(config: Mapping[str, Any], meaning: Meaning, runtime: str) -> str:
    """Return the options for vLLM or SGLang, checked with its emulator.

    Raises: ValueError for another runtime, or where no options do it.
    """
    if runtime not in SERVERS:
        raise ValueError(
            f"{runtime} takes no overrides of a config on its command line; expected "
            f"{' or '.join(SERVERS)}. `posenc doctor --fix --out FOLDER` writes a copy."
        )
    reasons = []
    try:
        for _, parameters, _ in candidates(meaning, fold=False):
            given: dict[str, Any] = {"rope_parameters": parameters.get("all", parameters)}
            if (longest := largest(parameters, meaning)) != model_of(config).max_positions:
                given["max_position_embeddings"] = longest
            computed = RUNTIMES[runtime](overridden(config, given, runtime), None)
            if computed.error is None and (computed.max_length or 0) < meaning.max_length:
                computed = Computed(f"admits {computed.max_length} tokens only")
            reason = disagreement(computed, meaning.computed)
            if not reason:
                option, length = SERVERS[runtime]
                text = shlex.quote(json.dumps(given))
                return f"{option} {text} {length} {meaning.max_length}"
            reasons.append(reason)
    except (ArithmeticError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no options of {runtime} carry these numbers ({error}).") from error
    raise ValueError(f"{runtime} cannot: {reasons[0] if reasons else 'no recipe is known'}.")


def overridden(config: Mapping[str, Any], given: Mapping[str, Any], runtime: str) -> dict[str, Any]:
    """Return the config as the server sees it: vLLM replaces the rope dict, SGLang merges."""
    result = flatten(config)
    for name in ("rope_parameters", "rope_scaling"):
        if name not in given:
            continue
        new = dict(given[name] or {})
        before = result.get("rope_scaling") or result.get("rope_parameters") or {}
        nested = any(isinstance(v, Mapping) for v in (*before.values(), *new.values()))
        if runtime == "sglang" and not nested:
            outer = result.get("rope_theta")
            merged = {"rope_theta": outer} if outer is not None else {}
            merged.update({k: v for k, v in before.items() if k != "type"})
            new = {**merged, **new}
        elif not nested:
            new.setdefault("rope_theta", None)
        for key in (*dual.OURS,):
            if key != "partial_rotary_factor":
                result.pop(key, None)
        result["rope_parameters"] = new
    for key, value in given.items():
        if key not in ("rope_parameters", "rope_scaling"):
            result[key] = value
    return result
