"""Draw the README's figure: compare_figure.py STUDY.json FIGURE.svg"""

from __future__ import annotations

import sys
from pathlib import Path

from posenc.compare.judging.near_far import encodings_best_first
from posenc.compare.page.figures import chart_of_losses, losses_by_length
from posenc.compare.results import Study
from posenc.report.chart import describe_curve_ends
from posenc.report.drawing import ranked_styles, write_svg

if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    study = Study.from_json(source.read_text(encoding="utf-8"))
    styles = ranked_styles(encodings_best_first(study))
    chart = chart_of_losses(losses_by_length(study), styles)
    description = f"Bits per byte by test length. {describe_curve_ends(chart.data)}"
    write_svg(chart.figure, target, description)
