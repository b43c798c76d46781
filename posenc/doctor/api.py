"""Ask a runtime from a program what it computes from a config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.runtimes.ask import RuntimeAnswer
from posenc.runtimes.ask import ask as ask_about_each


def ask(
    config: Mapping[str, Any] | Path,
    python: str | Path | None = None,
    *,
    runtime: str = "transformers",
    length: int = 4096,
) -> RuntimeAnswer:
    """Ask an installed runtime what it computes from a config.json's object, or a GGUF file.

    Args:
        config: the object, as in the file; for llama.cpp the path of a GGUF file.
        python: the interpreter that has the runtime; None for the one that runs.
        runtime: "transformers", "vllm", "sglang", "mlx-lm" or "llama.cpp".
        length: tokens to judge at. Whether frequencies change is compared with those at 2, 1,025
            and twice as many tokens.

    Returns: its own answer: rotations (radians per token, one a pair, and the multiplier of cos and
    sin, for each kind of layers), softmax scales, whether frequencies change with the length; or
    its words of refusal. Of llama.cpp, what its loader makes of the file's keys.
    Raises: ValueError, in one line, if the interpreter gives no answer, or no probe asks the
    runtime.

    >>> answer = posenc.doctor.ask({"model_type": "llama", "rope_theta": 5e5})  # doctest: +SKIP
    >>> answer.version, answer.rotations[0].inv_freq[:2]  # doctest: +SKIP
    ('5.23.0', (1.0, 0.81461...))
    """
    (answer,) = ask_about_each([(config, [length, 2, 1025, 2 * length])], python, runtime)
    return answer
