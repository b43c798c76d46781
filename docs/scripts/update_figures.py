"""Write the figures of `posenc inspect` and `posenc compare` that the documents show, into
docs/figures.

make readme  # those of encodings and of the comparison in results/compare
python docs/scripts/update_figures.py NAME FOLDER TEXT WORD WORD  # NAME.svg, see PARTS
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

import posenc
from posenc.compare.judging.near_far import encodings_best_first
from posenc.compare.page.figures import chart_of_losses, losses_by_length
from posenc.compare.results import Study
from posenc.encodings.base.position_encoding import ModelShape
from posenc.encodings.registry import create
from posenc.inspect import charts
from posenc.inspect.checkpoint.figures import attention_chart
from posenc.inspect.encoding.precision import exact_frequencies_of
from posenc.inspect.encoding.scores import decay
from posenc.report.chart import describe_curve_ends
from posenc.report.drawing import ranked_styles, write_svg
from posenc.report.html_page import Plot, describe_plot

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/figures"
COMPARED = ROOT / "results/compare/study.json"
"""The study of the README's figure, written by experiments/compare.sh."""
SHAPE = ModelShape(512, 8, head_dim=64, train_length=2048)
"""What `posenc inspect encoding` takes without options."""
CAUSAL = replace(SHAPE, causal=True)
PARTS = ("attention", "words", "layers")
"""Attention of the last layer; what exchanging two words changes, by word and by layer."""


TABLE = ModelShape(64, 1, head_dim=64, train_length=128)
"""Of the picture of the sinusoidal table."""


def of_encodings() -> dict[str, Plot]:
    """Return the figures that need no checkpoint, by name."""
    names = ("nope", "sinusoidal", "rope", "alibi")
    decays = {name: decay(create(name, SHAPE), SHAPE) for name in names}
    scores = {name: (measured.distances, measured.same) for name, measured in decays.items()}
    waves = {name: wavelengths(name) for name in ("rope", "linear", "ntk", "yarn")}
    alibi, t5, far = posenc.ALiBi(num_heads=8), create("t5", CAUSAL), torch.arange(200)
    added = create("sinusoidal", TABLE).embed(torch.zeros(1, 128, 64), torch.arange(128))[0]
    drawn = {
        "inspect-decay": (
            charts.score_chart({name: scores[name] for name in names[1:]}),
            "Score of a random vector with itself by distance for sinusoidal, rope and alibi.",
        ),
        "learn-order": (
            charts.score_chart({name: scores[name] for name in ("nope", "alibi")}),
            "Score by distance: a flat line without positions, a falling one with ALiBi.",
        ),
        "learn-sinusoidal": (
            charts.heat_map_chart(added.numpy(), "dimension", "position, tokens", "value added"),
            "The sinusoidal table: waves that get longer from left to right.",
        ),
        "learn-rope": (
            charts.rotation_chart(math.degrees(1), 6),
            "The fastest pair of channels at positions 0 to 5, a radian further each time.",
        ),
        "learn-biases": (
            charts.bias_chart(alibi.bias(far[:65]).numpy(), range(65)),
            "ALiBi's bias by distance, one straight line for each of eight heads.",
        ),
        "learn-buckets": (
            charts.bucket_chart(t5.bucket(far).tolist(), None),
            "T5's bucket by distance: one each up to 15, then wider and wider, the last from 113.",
        ),
        "learn-wavelengths": (
            charts.wavelength_chart({"rope": waves["rope"]}, SHAPE.train_length),
            "Wavelength of each pair of RoPE; the slow pairs lie above the training length.",
        ),
        "learn-scaling": (
            charts.wavelength_chart(waves, SHAPE.train_length),
            "Wavelengths of RoPE and of three scalings by four.",
        ),
        "learn-slopes": (
            charts.slope_chart(posenc.ALiBi(num_heads=12).slopes),
            "ALiBi's slopes of twelve heads: those of eight heads, then four of those of sixteen.",
        ),
    }
    plots = {name: Plot(chart, "", said) for name, (chart, said) in drawn.items()}
    return plots | of_maps()


WORDS = ("the", "dog", "bites", "the", "man")
TOKENS = 12
"""Of the picture of layers."""


def of_maps() -> dict[str, Plot]:
    """Return the figures of who attends to whom: on words, and in layers with and without a
    window."""
    generator = torch.Generator().manual_seed(0)
    by_word = {word: torch.randn(16, generator=generator) for word in sorted({*WORDS})}
    x = torch.stack([by_word[word] for word in WORDS]).expand(1, 1, -1, -1)
    places = torch.arange(len(WORDS))
    attention = [
        posenc.attention_weights(x, x, encoding, q_positions=places, kv_positions=places)[0, 0]
        for encoding in (None, posenc.RoPE(16, interleaved=False))
    ]
    full = posenc.masks.causal
    seen = [mask.tensor(TOKENS) for mask in (full, full & posenc.masks.sliding_window(4))]
    return {
        "learn-words": Plot(
            attention_chart(torch.stack(attention).numpy(), WORDS, ["no positions", "RoPE"]),
            "",
            "Attention of five words. Without positions both rows of `the` are equal, with RoPE "
            "they differ.",
        ),
        "learn-layers": Plot(
            attention_chart(
                torch.stack(seen).float().numpy(),
                [str(token) for token in range(TOKENS)],
                ["a full layer", "a window of four"],
                "seen",
            ),
            "",
            "Which keys each query sees: all earlier ones in a full layer, the nearest four in a "
            "window.",
        ),
    }


def wavelengths(name: str) -> list[float]:
    """Return the tokens per turn of each pair of an encoding."""
    angles = exact_frequencies_of(create(name, SHAPE))
    assert angles is not None
    return [2 * math.pi / float(f) for f in angles.inv_freq]


def of_comparison() -> Plot:
    """Return the figure of the README: the losses of a comparison by test length."""
    study = Study.from_json(COMPARED.read_text(encoding="utf-8"))
    styles = ranked_styles(encodings_best_first(study))
    chart = chart_of_losses(losses_by_length(study), styles)
    return Plot(chart, "", f"Bits per byte by test length. {describe_curve_ends(chart.data)}")


def of_checkpoint(name: str, folder: Path, text: str, words: tuple[str, str]) -> Plot:
    """The figure of a checkpoint that the last part of `name` names."""
    from posenc.inspect.checkpoint.figures import attention_plots, swap_plots
    from posenc.inspect.checkpoint.measurements import Request, measure_checkpoint

    part = name.rpartition("-")[2]
    if part not in PARTS:
        raise SystemExit(f"{name} must end with one of {', '.join(PARTS)}.")
    sheet = measure_checkpoint(Request(folder, text, words))
    assert sheet.swap is not None
    drawn = [*attention_plots(sheet, [sheet.structure.layers - 1])]
    drawn += swap_plots(sheet.swap, sheet.sentence.labels)
    plots = [plot for plot in drawn if isinstance(plot, Plot)]
    return plots[PARTS.index(part)]


def main(arguments: list[str], target: Path = FIGURES) -> None:
    """Write what the command line asks for."""
    if arguments:
        name, folder, text, first, second = arguments
        plots = {name: of_checkpoint(name, Path(folder), text, (first, second))}
    else:
        plots = of_encodings() | {"compare": of_comparison()}
    for name, plot in plots.items():
        write_svg(plot.chart.figure, target / f"{name}.svg", describe_plot(plot))


if __name__ == "__main__":
    main(sys.argv[1:])
