"""Try torch's kernels for the CPU at several sizes, and record what this release computes wrongly.

Run it with the Python of an environment that has the release; it writes one line of
KNOWN_WRONG_FORMS in posenc/attend/torch_faults.py.
"""

import re
from pathlib import Path

import torch

from posenc.attend import torch_faults

FILE = Path(__file__).parents[2] / "posenc/attend/torch_faults.py"
SIZES = ((8, 8), (8, 600), (70, 1100), (300, 520), (800, 1300))
"""Queries and keys. The kernel's blocks of queries and keys depend on both."""


def record(text: str, release: str, wrong: set[str]) -> str:
    """Return the source with the line of this release, among the others in their order."""
    begin, rest = text.split("KNOWN_WRONG_FORMS: dict[str, tuple[str, ...]] = {\n")
    lines, end = rest.split("}\n", 1)
    known = dict(re.findall(r'^    "([\d.]+)": (.*),$', lines, re.MULTILINE))
    in_order = tuple(name for name in torch_faults.TRIALS if name in wrong)
    known[release] = str(in_order).replace("'", '"')
    order = sorted(known, key=lambda each: [int(part) for part in each.split(".")])
    written = "".join(f'    "{each}": {known[each]},\n' for each in order)
    return f"{begin}KNOWN_WRONG_FORMS: dict[str, tuple[str, ...]] = {{\n{written}}}\n{end}"


def main() -> None:
    wrong: set[str] = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for torch_faults.NUM_QUERIES, torch_faults.NUM_KEYS in SIZES:
            wrong |= torch_faults.wrong_forms()
    text = FILE.read_text(encoding="utf-8")
    FILE.write_text(record(text, torch_faults.RELEASE, wrong), encoding="utf-8")
    print(f"torch {torch_faults.RELEASE}: {', '.join(sorted(wrong)) or 'all forms right'}")


if __name__ == "__main__":
    main()
