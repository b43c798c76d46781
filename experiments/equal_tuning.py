"""Tune the default encodings and NoPE alike for the default recipe, and record the choices.

    python experiments/equal_tuning.py FOLDER [RUN ...]

runs the search of posenc/compare/plan/equal_tuning.py as `posenc compare --tune` does, one trial
after the other on one core, and writes CHOICES_FILE, which the default comparison takes. It goes on
where it was stopped, and takes finished trials of the folders RUN. About an hour.
"""

import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from posenc.compare.defaults import DEFAULT_ENCODINGS
from posenc.compare.options import Options
from posenc.compare.plan.equal_tuning import CHOICES_FILE, RecordedChoices, Search, recipe_of
from posenc.compare.plan.plan import make_plan, with_text
from posenc.compare.results import TrialResult
from posenc.compare.reuse import reuse_trials
from posenc.compare.trial.config import TrialConfig, write_trial
from posenc.compare.trial.result_files import is_done, load_results
from posenc.compare.trial.run_trial import run_trial
from posenc.files.opening import make_folder, make_subfolder

ENCODINGS = (*DEFAULT_ENCODINGS, "nope")
"""Encodings with recorded choices: NoPE is what others are most often compared with."""


def main(folder: Path, *reused: str) -> None:
    """Run the search in `folder` and write the choices after each of its rounds.

    reused: folders of runs whose finished trials are taken.
    """
    options = Options([*ENCODINGS], tune=True, device="cpu", precision="float32")
    plan = with_text(make_plan(options), folder)
    search = plan.search
    assert search is not None and plan.splits is not None
    make_folder(folder)
    plan.splits.write(folder)
    while True:
        reuse_trials(folder, search.trials, [Path(run) for run in reused])
        for trial in search.trials:
            if not is_done(folder, trial):
                _run(trial, folder)
        results, _ = load_results(folder, search.trials)
        _write_choices(plan.task_trials[0], search, results)
        if not search.widen(results):
            break


def _write_choices(
    recipe: TrialConfig, search: Search, results: Mapping[TrialConfig, TrialResult]
) -> None:
    """Write the choices of a search for the trials of a recipe, and print each with its loss."""
    checks = search.checks(results)
    for check in checks:
        print(check.encoding, check.best, f"of {len(check.tried)}", check.edges)
    steps = search.trials[0].steps
    made = (
        f"trials of {steps} steps with one seed, {datetime.now(UTC):%Y-%m-%d}, "
        "by experiments/equal_tuning.py"
    )
    recorded = RecordedChoices(recipe_of(recipe), made, checks)
    CHOICES_FILE.write_text(recorded.to_json() + "\n", encoding="utf-8")


def _run(trial: TrialConfig, folder: Path) -> None:
    """Train one trial in its folder, and print its loss."""
    home = make_subfolder(folder / trial.folder)
    write_trial(home, trial)
    began = time.perf_counter()
    run_trial(trial, folder, home, lambda kind, **values: None, checkpoint_steps=10_000)
    bits = load_results(folder, [trial])[0][trial].training[-1].valid
    seconds = time.perf_counter() - began
    where = f"{trial.encoding} lr {trial.lr:g} tables x{trial.encoding_lr:g}"
    print(f"{where}: {bits:.4f} bits, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
