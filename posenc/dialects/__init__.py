"""Emulate what each runtime computes from a checkpoint's position settings; read and write configs.

Nothing here loads torch or transformers. A config takes milliseconds.
"""

from collections.abc import Mapping
from typing import Any


def frequencies(config: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
    """Return the rotation that a config.json's dict means; see `conformance.frequencies`."""
    from posenc.dialects import conformance

    return conformance.frequencies(config, length)
