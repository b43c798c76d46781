"""What `posenc doctor` prints about a copy that it wrote: what was changed, and by whom it was
proved."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posenc.doctor.report import LAYOUTS, report_of_lines
from posenc.report.report import Report

if TYPE_CHECKING:
    from posenc.doctor.cures.fixing import FixedCopy, FixedGguf
    from posenc.doctor.cures.measure_layout import ConvertedCopy

MOST_FILES_NAMED = 8
"""Files that were left behind, of which no more are named."""
ADVICE_BY_RUNTIME = {
    "llama.cpp": "; no config can express these numbers: convert, then edit the GGUF file: "
    "posenc doctor model.gguf --like CONFIG --fix --out NEW",
}
"""What to do for a runtime that no config reaches."""


def report_of_converted_copy(out: Path, copy: "ConvertedCopy") -> Report:
    """Return that rows of q and k were permuted, and whether the config says so."""
    layout = LAYOUTS[copy.interleaved]
    line = f"{out}: rows of {copy.num_tensors} tensors permuted to {layout}"
    if copy.key:
        return _report_of_copy(out, [f"{line}, and {copy.key} in config.json says so"])
    if copy.interleaved == copy.expected_interleaved:
        return _report_of_copy(out, [line])
    return _report_of_copy(
        out,
        [
            f"{line}. No key of config.json says so: the family's code expects "
            f"{LAYOUTS[copy.expected_interleaved]} rows, so that only a program that is told reads "
            "this copy"
        ],
    )


def report_of_permuted_adapter(out: Path, tensor_count: int) -> Report:
    """Return that the rows of a LoRA adapter were permuted."""
    return _report_of_copy(out, [f"{out}: rows of {tensor_count} tensors permuted"])


def report_of_scaled_adapter(out: Path, tensor_count: int, factor: float) -> Report:
    """Return that the rows of a LoRA adapter were multiplied as those of its model."""
    return _report_of_copy(
        out, [f"{out}: {tensor_count} tensors of q's B: rotated rows * {factor:.7g}"]
    )


def report_of_fixed_gguf(out: Path, copy: "FixedGguf") -> Report:
    """Return what was changed in the copy of a GGUF file."""
    lines = [f"{out}:", *(f"  {line}" for line in copy.changes or ("nothing to change",))]
    lines += [f"assumed: {doubt}" for doubt in copy.doubts]
    return _report_of_copy(out, [*lines, "proved by the emulator: llama.cpp"])


def report_of_fixed_copy(
    out: Path, copy: "FixedCopy", prefer: str | None = None, settled: Sequence[str] = ()
) -> Report:
    """Return what was changed in the copy of a config, and by whom it was proved.

    prefer: the keys of --prefer. settled: a line for each change that it made before.
    """
    recipe = copy.recipe
    lines = [f"{out}: {recipe.name}", *(f"  {change}" for change in copy.changes)]
    lines += [f"assumed: {doubt}" for doubt in copy.doubts]
    lines += [
        f"left out, as it is not read for {copy.family}: {number}" for number in copy.unread_numbers
    ]
    lines += _lines_of_proof(copy)
    lines += [_line_about_unmended(name, why) for name, why in recipe.misreadings.items()]
    lines += [f"note: {note}" for note in recipe.notes]
    if copy.why_not_folded and recipe.misreadings:
        lines.append(f"a temperature cannot be folded into q: {copy.why_not_folded}")
    if prefer is not None:
        lines += [f"as --prefer {prefer} says:", *(f"  {line}" for line in settled)]
    return _report_of_copy(out, lines)


def _lines_of_proof(copy: "FixedCopy") -> list[str]:
    """Return by whom a copy was proved and by whom not, with what was done to its weights and which
    files are not in it."""
    proof = copy.proof
    lines = []
    multiplier = copy.recipe.folded_multiplier
    if multiplier != 1:
        lines.append(f"  {proof.num_folded} tensors of q: rotated rows * {multiplier**2:.7g}")
    if proof.asked_runtimes:
        lines.append(f"proved by asking them: {', '.join(proof.asked_runtimes)}")
    proved_in_words = ", ".join(copy.proved_runtimes) or "none"
    lines.append(f"proved by their emulators, from {proof.files_in_words}: {proved_in_words}")
    lines += [f"not proved: {name}: {status}" for name, status in copy.not_proved.items()]
    if proof.files_left_behind:
        dots = ", ..." if len(proof.files_left_behind) > MOST_FILES_NAMED else ""
        lines.append(f"left behind: {', '.join(proof.files_left_behind[:MOST_FILES_NAMED])}{dots}")
    return lines


def _line_about_unmended(runtime: str, why: str) -> str:
    """Return the line about a named runtime that does not compute from the copy what is meant."""
    refusal = why.removeprefix("refuses: ")
    result_in_words = why if refusal == why else f"refuses the copy: {refusal}"
    return f"not mended for {runtime}: {result_in_words}{ADVICE_BY_RUNTIME.get(runtime, '')}"


def _report_of_copy(out: Path, lines: Sequence[str]) -> Report:
    """Return what was written. lines: the first is the headline."""
    facts = {"written": str(out), "said": "\n".join(lines)}
    return report_of_lines("A copy", lines[0], lines[1:], facts, indent="")
