"""Emulate what each runtime computes from a checkpoint's position settings; read and write configs.

known/ computes by recorded facts, ask/ asks an installed runtime, files/ reads checkpoints, and
writers/ and weights/ change them. Nothing here loads torch or transformers. A config takes
milliseconds.
"""

from collections.abc import Mapping
from typing import Any


def frequencies(config: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
    """Return the rotation that a config.json's dict means, for other code to compare with.

    The dict has `kinds`, one dict for each kind of layer: kind, layout ("half-split" or
    "interleaved"), inv_freq (radians per token, one a pair), multiplier (of cos and sin) and more,
    see `conformance.frequencies`. length: tokens of the text, for types that change with it.
    """
    from posenc.runtimes import conformance

    return conformance.frequencies(config, length)
