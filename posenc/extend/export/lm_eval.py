"""Run lm-eval's tasks on the exported folder, if lm-eval is installed."""

import subprocess
import sys
from itertools import chain
from pathlib import Path

from posenc.lazy import require_package
from posenc.report.page.failure import RunFailed

RESULTS = "lm-eval"


def check_lm_eval(tasks: str, out: Path | None) -> None:
    """Check, before anything is measured, that lm-eval can run. Raises ValueError."""
    if out is None:
        raise ValueError(f"--lm-eval {tasks} reads the exported folder: name one with --out.")
    if "," in str(out):
        raise ValueError(f"--lm-eval cannot name a folder with a comma in it: {out}.")
    require_package("lm_eval", "--lm-eval")


def run_lm_eval(folder: Path, tasks: str, dtype: str, device: str) -> Path:
    """Run lm-eval's Hugging Face model on the folder in its own process, which shows its table. Its
    JSON is written to OUT/lm-eval.

    Raises: RunFailed where it ends with an error.
    """
    results = folder / RESULTS
    model_options = f"pretrained={folder.resolve()},dtype={dtype},trust_remote_code=False"
    options = {
        "--model": "hf",
        "--model_args": model_options,
        "--tasks": tasks,
        "--device": device,
        "--output_path": str(results.resolve()),
    }
    command = [sys.executable, "-P", "-m", "lm_eval", *chain.from_iterable(options.items())]
    # The table is printed on stderr like all text for people; stdout is for --json.
    ended = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
    if ended.returncode:
        raise RunFailed(f"lm-eval ended with {ended.returncode}; {folder} is written and proved.")
    return results
