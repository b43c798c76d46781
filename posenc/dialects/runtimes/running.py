"""What emulators share: their versions, and refusals turned into results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

from posenc.dialects.computed import ARITHMETIC, Computed, RefusedError, UnknownModelError
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


def emulator(runtime: str) -> Callable[[Callable[[Model, int | None], Computed]], Emulator]:
    """Decorate f(model, length): takes a config.json's dict, and returns a refusal as a result."""

    def decorate(compute: Callable[[Model, int | None], Computed]) -> Emulator:
        @wraps(compute)
        def emulate(config: Mapping[str, Any], length: int | None = None) -> Computed:
            model = model_of(config)
            try:
                computed = compute(model, length)
            except UnknownModelError as refused:
                computed = Computed(str(refused), knows=False)
            except RefusedError as refused:
                computed = Computed(str(refused), max_length=refused.max_length)
            except BadConfigError:
                raise
            except ARITHMETIC as error:  # values that the runtime's own code stops at as well
                computed = Computed(f"{type(error).__name__}: {error}")
            return replace(computed, version=VERSIONS[runtime])

        return emulate

    return decorate
