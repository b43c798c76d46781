"""Write docs/figures/doctor-kinds.svg: the rotation of each kind of layer of two models, as the
rotary modules of the installed transformers compute it.

Run by `make readme`.
"""

import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs/figures/doctor-kinds.svg"
MODELS = {"DeepSeek-V4": "deepseek-v4", "MiniMax-M2": "minimax-m2"}
"""Name -> whose conformance vector has its rotary settings, at six layers."""


def computed(name: str) -> tuple[Any, dict[str, list[float]]]:
    """Return transformers' config of a vector, and the frequencies of each kind of layer."""
    from posenc.runtimes.conformance import vectors

    sys.path.insert(0, str(ROOT))
    try:
        from tests.doctor.oracles import real
    finally:
        sys.path.remove(str(ROOT))
    (raw,) = [vector["config"] for vector in vectors() if vector["name"] == name]
    (kind,) = [c for c in real.config_classes().values() if c.model_type == raw["model_type"]]
    config = kind.from_dict(dict(raw))
    found = {}
    for rotary in real.rotary_modules(config):
        found |= {k: inv_freq for k, (inv_freq, _) in real.rebuilt(rotary, config).items()}
    return config, found


def lines() -> dict[str, list[float]]:
    """Return the wavelength in tokens of each pair, by model, kind and what of it rotates."""
    drawn = {}
    for title, name in MODELS.items():
        config, kinds = computed(name)
        for kind, inv_freq in sorted(kinds.items(), reverse=True):
            label = f"{title}{'' if kind == 'all' else f', {kind}'}"
            label += f": {2 * len(inv_freq)} of {config.head_dim} channels"
            drawn[label] = [2 * math.pi / f for f in inv_freq]
    return drawn


def write(path: Path) -> None:
    """Draw the lines."""
    from matplotlib.ticker import FuncFormatter

    from posenc.report.drawing import draw_legend_above, figure, line_styles, write_svg

    waves = lines()
    said = "; ".join(f"{label}, up to {max(each):,.0f} tokens" for label, each in waves.items())
    with figure("rotated pair of channels", "wavelength, tokens") as (drawn, axes):
        for label, style in line_styles(list(waves)).items():
            axes.plot(waves[label], label=label, **style.arguments_for_curve(len(waves[label])))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        draw_legend_above(drawn)
    write_svg(drawn, path, f"Wavelength of each rotated pair. {said}.")


if __name__ == "__main__":
    write(FIGURE)
