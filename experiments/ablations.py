"""One change at a time: each question of ablations.toml as runs of `posenc compare` and one table.

python experiments/ablations.py                        # every question
python experiments/ablations.py rope_base --seeds 3    # one of them, with more seeds
python experiments/ablations.py --steps 20 --out tried --tables tried   # to see that all run

Trials lie in runs/ablations, where two questions share those that both have, and go on where they
were stopped. The table of a question is results/ablations/QUESTION.csv, one row for each arm, seed
and length, with the difference from the first arm of that encoding, or from the first encoding
where there is one arm: the mean over paired seeds and half of its 95 % interval. Where learning
rates were checked, QUESTION_tried.csv has what each of them gave. scalings.py beside this file asks
what RoPE's scalings give after N steps of tuning.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from next_byte import score_next_byte
from refused import check_file, check_runs, refusing
from tables import half_95, write_table

from posenc.compare.budget import SUITE_SIZES, SUITES
from posenc.compare.options import Options
from posenc.compare.page.settings import rate_rows
from posenc.compare.results import TrialResult
from posenc.compare.study import run_study

ROOT = Path(__file__).parents[1]
HEADER = (
    "encoding", "arm", "seed", "length", "bits_per_byte", "parameters", "recipe", "steps", "lr",
    "minus", "difference", "half_95",
)  # fmt: skip


class Scored(NamedTuple):
    """A trial at a length, in the way that an arm runs it; bits is None where it cannot."""

    encoding: str
    arm: str
    seed: int
    length: int
    bits: float | None
    rest: tuple[object, ...]


def read_questions(path: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def arms(question: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every choice of the options that have several values, with a name of what is chosen."""
    options = {k: v for k, v in question.items() if k not in ("question", "encodings", "next_byte")}
    several = {key: values for key, values in options.items() if isinstance(values, list)}
    found = []
    for values in product(*several.values()):
        chosen = dict(zip(several, values, strict=True))
        found.append((" ".join(f"{k} {v}" for k, v in chosen.items()), {**options, **chosen}))
    return found


def scores_of(
    result: TrialResult, arm: str, study: Path, next_byte: bool
) -> list[tuple[str, int, float | None]]:
    """The arm, the length and the bits per byte of a trial, None where its encoding cannot."""
    if not next_byte:
        return [(arm, score.length, score.bits_per_byte) for score in result.by_length]
    return [
        (", ".join(filter(None, (arm, score.way))), score.length, score.bits_per_byte)
        for score in score_next_byte(study, result.config)
    ]


def runs(question: dict[str, Any], given: argparse.Namespace) -> dict[str, Options]:
    """What each arm of a question is a comparison of."""
    return {
        arm: Options(
            question["encodings"], seeds=given.seeds, steps=given.steps, workers=given.workers,
            text=given.text, out=given.out, **SUITE_SIZES | options,
        )
        for arm, options in arms(question)
    }  # fmt: skip


def ask(name: str, question: dict[str, Any], given: argparse.Namespace) -> Path:
    """Run the arms of a question and write its table."""
    scored = []
    for arm, options in runs(question, given).items():
        study = run_study(options, show=False)
        if study.rates:
            header, *tried = rate_rows(study)
            write_table(tried_table(name, given), header, tried)
        for result in study.finished:
            config = result.config
            for way, length, score in scores_of(
                result, arm, given.out, question.get("next_byte", False)
            ):
                rest = (result.parameters, config.recipe, config.steps, config.lr)
                bits = None if score is None else round(score, 4)  # as it is shown
                scored.append(Scored(config.encoding, way, config.seed, length, bits, rest))
    path = table(name, given)
    write_table(path, HEADER, with_differences(scored))
    return path


def with_differences(scored: Sequence[Scored]) -> Iterator[tuple[object, ...]]:
    """The rows of the table; a difference that nothing is known of is empty."""
    several = len({each.arm for each in scored}) > 1
    by_place: dict[tuple[str, str, int], dict[int, float]] = {}
    for each in scored:
        place = by_place.setdefault((each.encoding, each.arm, each.length), {})
        place[each.seed] = math.nan if each.bits is None else each.bits
    for each in scored:
        first = next(s for s in scored if not several or s.encoding == each.encoding)
        own = by_place[each.encoding, each.arm, each.length]
        other = by_place[first.encoding, first.arm, each.length]
        apart = [own[seed] - other[seed] for seed in own if seed in other]
        gaps = [gap for gap in apart if math.isfinite(gap)]
        bits = "cannot" if each.bits is None else f"{each.bits:.4f}"
        minus = " ".join(filter(None, (first.encoding, first.arm)))
        difference = f"{fmean(gaps):+.4f}" if gaps else ""
        half = f"{width:.4f}" if (width := half_95(gaps)) < math.inf else ""
        yield *each[:4], bits, *each.rest, minus, difference, half


def table(name: str, given: argparse.Namespace) -> Path:
    """Where the rows of a question go."""
    return given.tables / f"{name}.csv"


def tried_table(name: str, given: argparse.Namespace) -> Path:
    """Where its learning rates go, if they are checked."""
    return given.tables / f"{name}_tried.csv"


def main() -> None:
    known = read_questions(Path(__file__).with_name("ablations.toml"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("questions", nargs="*", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=SUITES["standard"].steps)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--text", action="append", help="as of posenc compare")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/ablations")
    parser.add_argument("--tables", type=Path, default=ROOT / "results/ablations")
    given = parser.parse_args()
    unknown = [name for name in given.questions if name not in known]
    if unknown:
        parser.error(f"unknown question {unknown[0]!r}; known: {', '.join(known)}.")
    asked = given.questions or list(known)
    with refusing(parser):
        check_runs([run for name in asked for run in runs(known[name], given).values()])
        for name in asked:
            check_file("--tables", table(name, given))
            check_file("--tables", tried_table(name, given))
        for name in asked:
            print(f"{known[name]['question']} {ask(name, known[name], given)}", flush=True)


if __name__ == "__main__":
    main()
