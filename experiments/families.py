"""Every causal and masked family of transformers, and those of text and images, tiny and random,
through inspect, extend with each method, and export: families.py RESULTS.csv [FAMILY...]. What is
in the file is not run again.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from tables import write_table
from tiny_models import LENGTH, VOCABULARY, tiny_folder

from posenc.command_line.errors import RunFailed
from posenc.extend.export import stock_reader as proof
from posenc.extend.export.prover import Prover
from posenc.extend.extension import ExtensionRun, extend, tune_and_export
from posenc.extend.measure.samples import sample_windows
from posenc.extend.options import Options
from posenc.extend.variants import WINDOW
from posenc.hf.checkpoint.tokenization import parse_token_ids
from posenc.inspect.checkpoint.measurements import Request, measure_checkpoint

TARGET, SECONDS = 3 * LENGTH, 240
QUICK = Options(
    windows=2, search_evaluations=1, task_trials=1, allow_cache_unsafe=True, anyway=True
)
WORKS, REFUSED, CRASHED = "works", "refused", "crashed"
UNREADABLE = "does not load in stock transformers"
AS_IT_IS = "none cannot be measured on this model: "
"""An export that nobody can read is a crash, whoever says it, and so is a model that does not run
as it is."""


class Row(NamedTuple):
    """What came of one stage of one family; `method` is empty but for an export."""

    family: str
    stage: str
    method: str
    outcome: str
    why: str


class Here:
    """The proof in this process: another one for each folder would take hours for its imports."""

    def __init__(self) -> None:
        self.returncode = 0

    def poll(self) -> int:
        return 0

    def communicate(self, asked: str) -> tuple[str, str]:
        said, complained = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(said):
                proof.main(*json.loads(asked))
        except Exception as error:  # in a process of its own, its last line
            self.returncode, complained = 1, f"{type(error).__name__}: {error}"
        return said.getvalue(), complained


class HereProver(Prover):
    def start(self) -> Any:
        return Here()


@contextlib.contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Raise RuntimeError in the block under `with` after so many seconds of CPU time. Wall time
    would let a busy machine crash a family."""

    def stop(*_: object) -> None:
        raise RuntimeError(f"not done after {seconds} s of CPU time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def attempt(family: str, stage: str, method: str, job: Any) -> tuple[Row, Any]:
    """Return the row of one stage of a family, and what `job` returned; None if it was refused (one
    sentence says why) or crashed (with the place in the code)."""
    try:
        with no_longer_than(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Row(family, stage, method, WORKS, ""), job()
    except (ValueError, RunFailed) as refused:
        why = " ".join(str(refused).split())
        broken = UNREADABLE in why or _kind(why.partition(AS_IT_IS)[2]) == CRASHED
        return Row(family, stage, method, CRASHED if broken else REFUSED, why), None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        where = f"{Path(place.filename).name}:{place.lineno}"
        return Row(family, stage, method, CRASHED, f"{said} ({where})"), None


def try_family(family: str, auto: Any) -> list[Row]:
    """Return the rows of every stage of a family, without the names of temporary folders.

    auto: the class of transformers that loads it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        rows = _try_family(family, auto, Path(scratch))
    return [row._replace(why=row.why.replace(f"{scratch}/", "")) for row in rows]


def _try_family(family: str, auto: Any, scratch: Path) -> list[Row]:
    """Build, inspect, extend and export a tiny model of a family in the folder `scratch`. Return a
    row for each of these stages; those after a failure are left out."""
    folder = scratch / family
    row, _ = attempt(family, "build", "", lambda: tiny_folder(family, auto, folder))
    rows = [row]
    if row.outcome != WORKS:
        return [row._replace(outcome="not built")]
    ids = " ".join(map(str, range(20, 40)))
    asked = Request(folder, ids, ("25", "31"), as_ids=True)
    rows.append(attempt(family, "inspect", "", lambda: measure_checkpoint(asked))[0])
    documents = [" ".join(str((7 * i + j) % 200 + 20) for j in range(400)) for i in range(8)]
    given: dict[str, Any] = {"options": QUICK, "as_ids": True}
    row, outcome = attempt(family, "extend", "", lambda: extend(folder, TARGET, documents, **given))
    rows.append(row)
    if outcome is None:
        return rows
    failed = [Row(family, "method", m, _kind(why), why) for m, why in outcome.not_measured.items()]
    worked = [Row(family, "method", m, WORKS, "") for m in outcome.measured]
    rows += worked + failed
    windows = sample_windows(lambda text: parse_token_ids(text, VOCABULARY), documents, TARGET, 1)
    run = ExtensionRun(outcome.checkpoint, windows, None, QUICK, lambda what, share: None, None)
    for name, (variant, _) in outcome.measured.items():
        if name in ("none", WINDOW) or variant.needs_special_runtime:
            continue
        out = scratch / f"out-{name}"

        def export(variant: Any = variant, out: Path = out) -> Any:
            with HereProver() as prover:
                tune_and_export(run, outcome, variant, out, prover)

        rows.append(attempt(family, "export", name, export)[0])
    return rows


def _kind(why: str) -> str:
    """Return CRASHED for a reason that names an exception, else REFUSED."""
    first = why.partition(":")[0]
    crashed = first.endswith(("Error", "Exception", "ByZero")) and " " not in first
    return CRASHED if crashed else REFUSED


def families() -> dict[str, str]:
    """Return, by model_type, the name of the class that loads a family: that for masked models if
    there is one, otherwise that for causal ones, and last that for text and images."""
    from transformers.models.auto import modeling_auto as auto

    masked = dict.fromkeys(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "AutoModelForMaskedLM")
    causal = dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM")
    images = dict.fromkeys(
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "AutoModelForImageTextToText"
    )
    return dict(sorted({**images, **causal, **masked}.items()))


def run(results: Path, names: list[str]) -> None:
    """Try the named families, or all that the file lacks, and write the file after each."""
    known = families()
    done: dict[str, list[Row]] = {}
    if results.exists():
        with results.open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                done.setdefault(row[0], []).append(Row(*row))
    done.pop("family", None)
    for name in names or [n for n in known if n not in done]:
        done[name] = try_family(name, getattr(transformers, known[name]))
        for row in done[name]:
            if row.outcome != WORKS:
                print(*row, flush=True)
        print(name, "done", flush=True)
        write_table(results, Row._fields, (row for key in sorted(done) for row in done[key]))


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
