"""The scripts of experiments/, imported as they run: with their own folder in the path."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "experiments"


def experiment(name: str) -> ModuleType:
    """The script experiments/NAME.py as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
