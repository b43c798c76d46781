"""What emulators share: their versions, and refusals turned into results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

from posenc.dialects.computed import ARITHMETIC, Computed, NotReadError, RefusedError
from posenc.dialects.model import BadConfigError, Model, model_of

VERSIONS = {
    "transformers-4": "4.56 to 4.57 (read from 4.57.3)",
    "transformers-5": "5.0 to 5.23 (read from 5.23.0)",
    "vllm": "0.33 (read from 0.33.0)",
    "sglang": "0.5.23 (read from 0.5.23)",
    "mlx-lm": "0.32 (read from 0.32.2)",
    "llama.cpp": "b11549 (converter and source 0c1e57098)",
}
"""The versions that each emulator covers, and the one it was read from."""

Emulator = Callable[[Mapping[str, Any], int | None], Computed]


CELLS = {
    "transformers-4": "transformers4",
    "transformers-5": "transformers5",
    "vllm": "vllm",
    "sglang": "sglang",
    "mlx-lm": "mlx",
    "llama.cpp": "gguf",
}
"""The key of each runtime's facts in a line of families.json."""


def emulator(runtime: str) -> Callable[[Callable[[Model, int | None], Computed]], Emulator]:
    """Decorate f(model, length): takes a config.json's dict, and returns a refusal as a result.

    A family whose facts of this runtime are missing is never emulated: a row is null if the runtime
    has no such model, and absent if nobody has read it.
    """

    def decorate(compute: Callable[[Model, int | None], Computed]) -> Emulator:
        @wraps(compute)
        def emulate(config: Mapping[str, Any], length: int | None = None) -> Computed:
            model = model_of(config)
            facts = model.facts.get(CELLS[runtime], {})
            if not facts:
                return unread(runtime, model) if facts is not None else no_model(runtime, model)
            try:
                computed = compute(model, length)
            except NotReadError:
                return unread(runtime, model)
            except RefusedError as refused:
                computed = Computed(str(refused), max_length=refused.max_length)
            except BadConfigError:
                raise
            except ARITHMETIC as error:  # values that the runtime's own code stops at as well
                computed = Computed(f"{type(error).__name__}: {error}")
            if every := facts.get("no_rope_every"):  # whatever the config says
                still = tuple(i for i in range(model.num_layers) if (i + 1) % every == 0)
                computed = replace(computed, without_rotation=still)
            return replace(computed, version=VERSIONS[runtime], read=facts["read"])

        return emulate

    return decorate


def unread(runtime: str, model: Model) -> Computed:
    """Return the answer for a cell that nobody has read."""
    name = model.model_type or "a config without model_type"
    return Computed(
        f"posenc does not know what {runtime} computes for {name}",
        known="unknown",
        version=VERSIONS[runtime],
    )


def no_model(runtime: str, model: Model) -> Computed:
    """Return the answer of a runtime without such a model."""
    return Computed(
        f"{runtime} has no model for {model.model_type!r}",
        known="no model",
        version=VERSIONS[runtime],
    )
