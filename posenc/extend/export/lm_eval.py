"""Run lm-eval's tasks on the exported folder, if lm-eval is installed."""

import importlib.util
import subprocess
import sys
from itertools import chain
from pathlib import Path

from posenc.command_line.errors import RunFailed

RESULTS_FOLDER = "lm-eval"
INSTALL_COMMAND = 'pip install "lm-eval[hf]>=0.4.9"'


def check_lm_eval(tasks: str, out: Path | None) -> None:
    """Raise ValueError, before anything is measured, unless lm-eval is installed and there is a
    folder that it can name. tasks: names of lm-eval, between commas."""
    if out is None:
        raise ValueError(f"--lm-eval {tasks} reads the exported folder: name one with --out.")
    if "," in str(out):
        raise ValueError(f"--lm-eval cannot name a folder with a comma in it: {out}.")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"--lm-eval: lm_eval is not installed: {INSTALL_COMMAND}")


def run_lm_eval(folder: Path, tasks: str, dtype: str, device: str) -> Path:
    """Run tasks of lm-eval on the folder, in another process that prints its table on stderr.
    Return the folder of its JSON, OUT/lm-eval.

    Raises: RunFailed where it ends with an error.
    """
    results = folder / RESULTS_FOLDER
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
    completed = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
    if completed.returncode:
        raise RunFailed(
            f"lm-eval ended with {completed.returncode}; {folder} is written and proved."
        )
    return results
