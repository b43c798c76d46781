"""The kept results of the sweeps, swept.json: of each runtime its version and, by config class, the
family, the verdict, and a digest of the facts that were held to the runtime's own modules."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.runtimes.families import RUNTIME_FILES, facts_of_family

PATH = Path(__file__).with_name("swept.json")


def digest(name: str, runtime: str) -> str:
    """Return what changes with a family's facts of a runtime; empty without any."""
    facts = facts_of_family(name) or {}
    of_others = {*RUNTIME_FILES.values()} - {RUNTIME_FILES[runtime]}
    own = {key: value for key, value in facts.items() if key not in of_others}
    if not facts.get(RUNTIME_FILES[runtime]):
        return ""
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]


def kept() -> dict[str, dict[str, Any]]:
    """Return runtime -> its `version`, `rows` and `towers`: class -> why its language model is read
    otherwise, empty where it is not."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}


def keep(
    runtime: str,
    version: str,
    verdicts: Mapping[str, tuple[str, str]],
    towers: Mapping[str, str] | None = None,
    *,
    whole: bool = True,
) -> None:
    """Write what a sweep found: class -> its family and the verdict. whole: of all classes."""
    rows = {n: [name, said, digest(name, runtime)] for n, (name, said) in verdicts.items()}
    answer = kept()
    if not whole:
        rows = {**answer[runtime]["rows"], **rows}
        towers = answer[runtime]["towers"]
    answer[runtime] = {"version": version, "rows": rows, "towers": towers or {}}
    lines = json.dumps(answer, indent=1, sort_keys=True)
    for row in (row for said in answer.values() for row in said["rows"].values()):
        lines = lines.replace(json.dumps(row, indent=1).replace("\n", "\n   "), json.dumps(row))
    PATH.write_text(lines + "\n", encoding="utf-8")


def stale() -> list[str]:
    """Return the runtimes and families whose facts are others than those that were swept."""
    found = []
    for runtime, said in kept().items():
        for name, _, then in said["rows"].values():
            if digest(name, runtime) != then:
                found.append(f"{runtime}: {name}")
    return found


def counts(runtime: str) -> Counter[str]:
    """Return how many classes have each verdict."""
    return Counter(verdict for _, verdict, _ in kept()[runtime]["rows"].values())
