"""Write the figures of `posenc inspect` that the documents show, into docs/figures.

make readme                                              # those of encodings
python docs/update_figures.py NAME FOLDER TEXT WORD WORD # NAME.svg; its end says which, see PARTS
"""

from __future__ import annotations

import sys
from pathlib import Path

from posenc.encodings.base.shape import ModelShape
from posenc.encodings.registry import create
from posenc.inspect.encoding import figures
from posenc.inspect.encoding.scores import decay
from posenc.report.page.drawing import write_svg
from posenc.report.page.page import Plot

FIGURES = Path(__file__).parent / "figures"
SHAPE = ModelShape(512, 8, head_dim=64, train_length=2048)
"""What `posenc inspect` takes without options."""
PARTS = ("attention", "words", "layers")
"""Attention of the last layer; what exchanging two words changes, by word and by layer."""


def of_encodings() -> dict[str, Plot]:
    """The figures that need no checkpoint, by name."""
    decays = {name: decay(create(name, SHAPE), SHAPE) for name in ("sinusoidal", "rope", "alibi")}
    return {
        "inspect-decay": Plot(
            figures.score_by_distance(decays, same=True),
            "",
            "Score of a random vector with itself by distance for sinusoidal, rope and alibi.",
        )
    }


def of_checkpoint(name: str, folder: Path, text: str, words: tuple[str, str]) -> Plot:
    """The figure of a checkpoint that the last part of `name` names."""
    from posenc.inspect.checkpoint import page
    from posenc.inspect.checkpoint.sheet import Request, measure_checkpoint

    part = name.rpartition("-")[2]
    if part not in PARTS:
        raise SystemExit(f"{name} must end with one of {', '.join(PARTS)}.")
    sheet = measure_checkpoint(Request(folder, text, words))
    assert sheet.swap is not None
    drawn = [*page.attention_plots(sheet, [sheet.structure.layers - 1])]
    drawn += page.swap_plots(sheet.swap, sheet.sentence.labels)
    plots = [plot for plot in drawn if isinstance(plot, Plot)]
    return plots[PARTS.index(part)]


def main(arguments: list[str], target: Path = FIGURES) -> None:
    """Write what the command line asks for."""
    if arguments:
        name, folder, text, first, second = arguments
        plots = {name: of_checkpoint(name, Path(folder), text, (first, second))}
    else:
        plots = of_encodings()
    for name, plot in plots.items():
        write_svg(plot.figure, target / f"{name}.svg", plot.description)


if __name__ == "__main__":
    main(sys.argv[1:])
