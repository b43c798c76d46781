"""The runtimes that posenc emulates: a new one is added here.

To add one, write its two files (see `posenc.runtimes.known`), and add its line to RUNTIMES below
and to `families.RUNTIME_FILES`. One that can be installed gets a probe in ask/ as well.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from posenc.runtimes.computed_positions import ComputedPositions
from posenc.runtimes.known import llama_cpp, mlx_lm, sglang, transformers4, transformers5, vllm
from posenc.runtimes.known.emulator import Emulator, emulator
from posenc.runtimes.known.releases import AS_READ

RUNTIMES: dict[str, Emulator] = {
    "transformers-4": emulator("transformers-4", transformers4.compute),
    "transformers-5": emulator("transformers-5", transformers5.compute),
    "vllm": emulator("vllm", vllm.compute),
    "sglang": emulator("sglang", sglang.compute),
    "mlx-lm": emulator("mlx-lm", mlx_lm.compute),
    "llama.cpp": emulator("llama.cpp", llama_cpp.compute),
}
"""Name -> emulate(config, length, version)."""


def emulate(
    config: Mapping[str, Any],
    length: int | None = None,
    names: Iterable[str] | None = None,
    versions: Mapping[str, str] = AS_READ,
) -> dict[str, ComputedPositions]:
    """Return what each of these runtimes (default: all six) computes from a config.json's dict.

    length: tokens of the text, for frequencies that change with it; None for the config's
    max_position_embeddings.
    versions: runtime -> its version, if it is not the one that was read.

    A refusal, or that a runtime does not know the family, is a result and is not raised.
    Raises: ValueError for a name that is no runtime.
    """
    chosen = list(names) if names is not None else list(RUNTIMES)
    unknown = [name for name in chosen if name not in RUNTIMES]
    if unknown:
        raise ValueError(
            f"unknown runtime {', '.join(unknown)}; expected one of {', '.join(RUNTIMES)}."
        )
    return {name: RUNTIMES[name](config, length, versions.get(name)) for name in chosen}
