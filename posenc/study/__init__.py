"""The old name of posenc.compare, for one release."""

import importlib
import sys
import warnings

warnings.warn(
    "posenc.study is posenc.compare now; the old name goes with the next release.",
    DeprecationWarning,
    stacklevel=2,
)

_RENAMED = {
    "compare": "compare.study",
    "corpus": "compare.splits",
    "hardware": "report.machine",
    "spec": "compare.as_built",
    "statistics": "compare.summary",
}
_KEPT = (
    *("checkpoint", "command", "evaluate", "figures", "page", "progress", "results"),
    *("sweep", "tables", "train", "trial", "worker"),
)

for _old, _new in {**{name: f"compare.{name}" for name in _KEPT}, **_RENAMED}.items():
    globals()[_old] = sys.modules[f"{__name__}.{_old}"] = importlib.import_module(f"posenc.{_new}")
