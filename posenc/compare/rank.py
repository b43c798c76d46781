"""The process of one rank of a trial; the first rank writes what a trial writes.

By hand, on several machines that share the study's folder:
torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 -m posenc.compare.rank \\
    STUDY_FOLDER TRIAL_FOLDER CHECKPOINT_STEPS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from posenc.compare.process import end_with_parent


def main(parent: str, study_folder: str, trial_folder: str, checkpoint_steps: str) -> int:
    end_with_parent(int(parent), stdin=False)  # torchrun's stdin may be nobody's pipe
    from torch import distributed

    from posenc.compare import worker
    from posenc.compare.ranks import Ranks
    from posenc.compare.trial import read_trial

    distributed.init_process_group("gloo")
    try:
        ranks, wanted = Ranks(), read_trial(Path(trial_folder)).ranks
        if wanted != ranks.count:
            raise ValueError(
                f"{trial_folder} is a trial of {wanted} ranks, and {ranks.count} were started."
            )
        return worker.work(study_folder, trial_folder, checkpoint_steps, ranks)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(str(os.getppid()), *sys.argv[1:]))
