"""Tune the default encodings alike for the default recipe, and record the choices.

    python experiments/equal_tuning.py FOLDER

runs the grid of posenc/compare/plan/tuning_grid.py as `posenc compare --tune` does, one trial after
the other on one core, and writes CHOICES, the file that the default comparison takes. It goes on
where it was stopped. About 40 minutes.
"""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from posenc.compare.options import Options
from posenc.compare.plan.plan import make_plan, with_text
from posenc.compare.plan.tuning_grid import CHOICES, RecordedChoices, recipe_of
from posenc.compare.trial.config import TrialConfig, write_trial
from posenc.compare.trial.files import is_done, load_results
from posenc.compare.trial.run_trial import run_trial
from posenc.files.opening import make_folder, make_subfolder


def main(folder: Path) -> None:
    """Run the grid in `folder` and write the choices."""
    plan = with_text(make_plan(Options(tune=True, device="cpu", precision="float32")), folder)
    search = plan.search
    assert search is not None and plan.splits is not None
    make_folder(folder)
    plan.splits.write(folder)
    while True:
        for trial in search.trials:
            if not is_done(folder, trial):
                _run(trial, folder)
        results, _ = load_results(folder, search.trials)
        if not search.widen(results):
            break
    checks = search.checks(results)
    for check in checks:
        print(check.encoding, check.best, f"of {len(check.tried)}")
    steps = search.trials[0].steps
    seconds = sum(result.timing.train_seconds for result in results.values() if result.timing)
    made = (
        f"{len(results)} trials of {steps} steps with one seed, {seconds / 60:.0f} minutes of one "
        f"core, {datetime.now(UTC):%Y-%m-%d}, by experiments/equal_tuning.py"
    )
    recorded = RecordedChoices(recipe_of(plan.task_trials[0]), made, checks)
    CHOICES.write_text(recorded.to_json() + "\n", encoding="utf-8")


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
    main(Path(sys.argv[1]))
