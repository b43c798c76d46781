"""Every sentence that `posenc doctor` prints about a result, as a report for each kind of result.

The terminal, a page and JSON show the same report: see posenc.report.report. What a rule finds
is said by the rule.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posenc.doctor.misreadings import Case
from posenc.doctor.rule import COMMAND_INDENT, SEVERITIES, Finding, Rule
from posenc.report.report import (
    Block,
    Code,
    Items,
    Labelled,
    Report,
    Section,
    Table,
    section_of_next_steps,
)
from posenc.runtimes.ask import RuntimeAnswer
from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation
from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.position_record import PositionRecord

if TYPE_CHECKING:
    from posenc.doctor.cures.measure_layout import LayoutVerdict

CODE_OF_TOO_LONG_TEXT = "PD064"
"""The rule about a text that is too long, for which no copy is written."""
LEGEND = (
    "multiplier: of cos and sin. switch: when the frequencies change. admits: the longest sequence."
)
"""What the headers of the table of runtimes mean."""
KNOWN = "known"
ASKED = "asked"
ANY_LENGTH = "any length"
MEANINGS_OF_CELLS = {
    KNOWN: "computed by posenc's emulator of this version.",
    ASKED: "answered by the installed runtime itself.",
    ANY_LENGTH: "the runtime sets no limit.",
}
"""Beginning of a cell of that table -> what it means."""
RUNTIMES_HEADER = (
    "runtime",
    "how, version",
    "frequencies",
    "multiplier",
    "softmax scale",
    "switch",
    "admits",
)
LAYOUTS = {True: "interleaved", False: "half-split"}


@dataclass(frozen=True)
class Judgement:
    """What the doctor found in a file.

    counted: the findings that count. silenced: those of rules that --ignore names. can_be_fixed:
    False where only the author can correct the file. notes: lines about runtimes that were asked
    and gave no answer, or answered in a release that is not recorded.
    """

    case: Case
    counted: Sequence[Finding]
    silenced: Sequence[Finding] = ()
    can_be_fixed: bool = True
    notes: Sequence[str] = ()


def report_of(judgement: Judgement) -> Report:
    """Return what a file means, what each runtime computes from it, the findings, and what to do
    next."""
    case = judgement.case
    blocks: list[Block] = [Items(_meaning_lines(case, explained=bool(judgement.counted)))]
    rows = [_cells_of_runtime(case, name) for name in _shown_runtimes(case)]
    blocks += [Table(RUNTIMES_HEADER, rows, name="runtimes"), Items(_legend(rows))]
    blocks += _lines_about_unjudged(case)
    if case.record is not None and case.record.doubts:
        blocks.append(Items([f"assumed: {doubt}" for doubt in case.record.doubts]))
    if judgement.silenced:
        blocks.append(f"ignored, as --ignore asks: {_counts_by_rule(judgement.silenced)}")
    blocks += [_block_of_finding(finding) for finding in judgement.counted]
    sections = [Section("", blocks)]
    steps = _next_steps(judgement)
    if steps:
        sections.append(section_of_next_steps(steps))
    return Report(
        title="What runtimes compute from a file",
        headline=_verdict(judgement),
        facts=facts_of(judgement),
        sections=sections,
        cautions=[*judgement.notes, *_lines_about_wrong_records(case)],
    )


def facts_of(judgement: Judgement) -> dict[str, Any]:
    """Return the object that --json prints of a judgement.

    record: what the file means, as PositionRecord.as_json gives it; null if that is unclear. rules:
    the findings that count. ignored: those that --ignore silences. runtimes: by name, what each
    computes. notes: the lines of judgement.notes; missing without one.
    """
    case = judgement.case
    facts: dict[str, Any] = {
        "record": None if case.record is None else case.record.as_json(),
        "rules": [finding.as_json() for finding in judgement.counted],
        "ignored": [finding.as_json() for finding in judgement.silenced],
        "runtimes": {name: computed.as_json() for name, computed in case.computed.items()},
    }
    if judgement.notes:
        facts["notes"] = list(judgement.notes)
    return facts


def _verdict(judgement: Judgement) -> str:
    """Return the answer in one line: how many errors and warnings there are."""
    case = judgement.case
    path = case.source.path
    if not judgement.counted:
        if case.is_opened_by_no_runtime:
            return f"Nothing is judged in {path}: no named runtime opens it."
        subject = "Nothing else" if judgement.silenced else "Nothing"
        return f"{subject} to complain about in {path}, for {', '.join(case.judged_runtimes)}."
    counts = Counter(finding.severity for finding in judgement.counted)
    num_errors, num_warnings = counts["E"], counts["W"]
    return (
        f"{num_errors} error{'s' * (num_errors != 1)}, "
        f"{num_warnings} warning{'s' * (num_warnings != 1)} in {path}."
    )


def _meaning_lines(case: Case, *, explained: bool) -> list[str]:
    """Return the lines about the lengths and rotations that the file means, or that they are
    unclear. explained: True if a finding says why."""
    record = case.record
    if record is None:
        why = "see the findings" if explained else case.why_unclear
        return [f"What the file means is unclear: {why}."]
    lines = [
        f"{record.model_type}, trained at {record.trained_length} tokens, meant for "
        f"{record.max_length}; judged at {record.length}"
    ]
    for kind in record.kinds:
        rotation = LayerRotation(kind.inv_freq, kind.multiplier)
        lines.append(f"  {_rotation_in_words(kind.name, rotation)}")
    if not record.kinds:
        lines.append("  no layer rotates")
    if case.metadata is None and case.model.indexer_is_interleaved is not None:
        lines.append(
            f"  indexer: {LAYOUTS[case.model.indexer_is_interleaved]} pairs, the attention's are "
            f"{LAYOUTS[case.model.interleaved]}; seen beyond index_topk tokens only"
        )
    return lines


def _rotation_in_words(kind: str, rotation: LayerRotation) -> str:
    """Return the rotation of a kind of layer in words. kind: its name; "all" where all layers
    rotate alike."""
    prefix = "" if kind == "all" else f"{kind}: "
    slowest = min((f for f in rotation.inv_freq if f), default=0.0)
    return (
        f"{prefix}rotates {2 * len(rotation.inv_freq)} channels of each head, slowest pair "
        f"{slowest:.4g} radians per position, multiplier {rotation.multiplier:.6g}"
    )


def _cells_of_runtime(case: Case, name: str) -> tuple[str, ...]:
    """Return the cells of a runtime's row, as RUNTIMES_HEADER names them."""
    computed = case.computed[name]
    differing_aspects = case.differences[name]
    how_known = _how_and_version(computed)
    if not computed.is_known:
        return (name, how_known, computed.status_in_words, "", "", "", "")
    if computed.error is not None:
        # A runtime that refuses the file admits a length only where its limit was known before.
        longest_in_words = (
            "" if computed.max_length is None else _longest_sequence_in_words(computed)
        )
        return (name, how_known, "refuses", "", "", "", longest_in_words)
    rotation_aspects = {"pairs", "frequencies", "layers"} & differing_aspects
    frequencies_verdict = "other" if rotation_aspects else "as meant"
    multipliers: list[str] = []
    if not _rotates_nothing(case, computed):
        multipliers = [f"{rotation.multiplier:.6g}" for rotation in computed.rotations.values()]
    multipliers_in_words = ", ".join(dict.fromkeys(multipliers))
    scale_in_words = "" if computed.softmax_scale is None else f"{computed.softmax_scale:.6g}"
    return (
        name,
        how_known,
        "" if case.meaning is None else frequencies_verdict,
        multipliers_in_words + (" (other)" if "multiplier" in differing_aspects else ""),
        scale_in_words + (" (other)" if "scale" in differing_aspects else ""),
        computed.switch,
        _longest_sequence_in_words(computed),
    )


def _legend(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines below the table of runtimes: what its headers mean, and those of
    MEANINGS_OF_CELLS that stand in its rows."""
    cells = [cell for row in rows for cell in row]
    explanations = [
        f"{word}: {meaning}"
        for word, meaning in MEANINGS_OF_CELLS.items()
        if any(cell.startswith(word) for cell in cells)
    ]
    return [LEGEND, " ".join(explanations)] if explanations else [LEGEND]


def _how_and_version(computed: ComputedPositions) -> str:
    """Return how an answer was found, and of which version it is: "asked, 5.24.0" where the runtime
    itself answered, "known, 0.33.0" where posenc's emulator did."""
    return f"{ASKED if computed.asked else KNOWN}, {computed.version}"


def _rotates_nothing(case: Case, computed: ComputedPositions) -> bool:
    """Return True if no layer of a config's model rotates in a runtime, whatever its rope dict."""
    return case.metadata is None and len(computed.without_rotation) >= case.model.num_layers


def _longest_sequence_in_words(computed: ComputedPositions) -> str:
    """Return the longest sequence that a runtime admits, in words."""
    return ANY_LENGTH if computed.max_length is None else str(computed.max_length)


def _block_of_finding(finding: Finding) -> Labelled:
    """Return a finding and its cure, in which the lines to copy are commands."""
    parts: list[str | Code] = [finding.message]
    for line in f"cure: {finding.cure}".split("\n"):
        is_command = line.startswith(COMMAND_INDENT)
        parts.append(Code(line.removeprefix(COMMAND_INDENT)) if is_command else line)
    return Labelled(f"{finding.severity} {finding.code}", parts)


def _shown_runtimes(case: Case) -> list[str]:
    """Return the runtimes that have a row: the named ones, but of a GGUF file those alone that are
    judged. Most runtimes read none, and their rows would say nothing."""
    wanted_runtimes = case.named_runtimes
    if case.metadata is not None and case.judged_runtimes:
        wanted_runtimes = case.judged_runtimes
    return [name for name in RUNTIMES if name in wanted_runtimes]


def _lines_about_unjudged(case: Case) -> list[str]:
    """Return the lines about named runtimes that are not judged, and who can ask them."""
    lines = []
    unknown_runtimes = case.named_runtimes_known_as("unknown")
    if unknown_runtimes:
        hint = ""
        if case.metadata is None and set(unknown_runtimes) - {"llama.cpp"}:
            hint = " `--ask PYTHON` asks the one that is installed there."
        lines.append(f"Not known to posenc, and not judged: {', '.join(unknown_runtimes)}.{hint}")
    runtimes_without_gguf = case.named_runtimes_known_as("no such file")
    if case.metadata is not None and runtimes_without_gguf and case.judged_runtimes:
        lines.append(f"Opens no GGUF file: {', '.join(runtimes_without_gguf)}.")
    return lines


def _counts_by_rule(silenced: Sequence[Finding]) -> str:
    """Return how often each rule fired, such as "PD017 (1 error), PD013 (2 warnings)"."""
    counts = Counter((finding.code, SEVERITIES[finding.severity]) for finding in silenced)
    return ", ".join(f"{code} ({n} {word}{'s' * (n != 1)})" for (code, word), n in counts.items())


def _lines_about_wrong_records(case: Case) -> list[str]:
    """Return a line about each runtime whose own answer differs from posenc's emulator of it."""
    return [
        f"{name} {case.computed[name].version} itself answers otherwise than posenc recorded for "
        f"this version ({', '.join(sorted(aspects))}). The table shows its own answer; the record "
        "is wrong: please report it."
        for name, aspects in case.aspects_that_contradict_emulator.items()
    ]


def _next_steps(judgement: Judgement) -> list[str | Code]:
    """Return what the user may do next, in sentences and commands."""
    case = judgement.case
    counted = judgement.counted
    path = shlex.quote(str(case.source.path))
    steps: list[str | Code] = []
    if counted:
        steps.append(f"`posenc doctor --explain {counted[0].code}` tells more.")
    has_errors = any(f.severity == "E" and f.code != CODE_OF_TOO_LONG_TEXT for f in counted)
    if judgement.can_be_fixed and has_errors:
        steps.append("`--fix --out NEW` writes a mended copy, or says why not.")
    if case.is_opened_by_no_runtime:
        steps.append(
            f"No named runtime opens {case.source.path.name}. Convert the model, and compare:"
        )
        steps.append(Code(f"posenc doctor {path} CONVERTED"))
    if case.metadata is not None:
        steps += ["Compare it with its model's folder:", Code(f"posenc doctor {path} FOLDER")]
    rotates = case.meaning is not None and bool(case.meaning.computed.rotations)
    is_judged = rotates and not case.is_opened_by_no_runtime
    if not counted and case.length is None and is_judged:
        steps.append("`--length N` judges a longer text, and says what scaling it needs.")
    return steps


def report_of_answers(case: Case, why: str, notes: Sequence[str]) -> Report:
    """Return what the asked runtimes compute, for a family whose meaning posenc does not know.

    why: what posenc does not know. notes: as of a Judgement.
    """
    blocks: list[Block] = []
    for name, asked in case.own_answers.items():
        measurement_lines = _lines_of_measurement(case.computed[name], asked)
        title = f"{name} {asked.version}, asked: {asked.model or 'no answer'}"
        blocks.append(Items([title, *(f"  {line}" for line in measurement_lines)]))
    facts: dict[str, Any] = {
        "judged": False,
        "why": why,
        "runtimes": {name: case.computed[name].as_json() for name in case.own_answers},
    }
    if notes:
        facts["notes"] = list(notes)
    return Report(
        title="What runtimes compute from a file",
        headline=f"{case.source.path}: {why}. What the runtimes at hand compute, asked themselves:",
        facts=facts,
        sections=[Section("", blocks)],
        cautions=notes,
    )


def _lines_of_measurement(computed: ComputedPositions, asked: RuntimeAnswer) -> list[str]:
    """Return the lines about what one installed runtime computes, as it was measured in it, or why
    it was not."""
    refusal = asked.refusal or asked.stop_message
    if refusal:
        return [f"refuses: {refusal}"]
    if asked.why_unmeasured:
        return [f"not measured: {asked.why_unmeasured}"]
    lines = [_rotation_in_words(kind, rotation) for kind, rotation in computed.rotations.items()]
    if not lines:
        lines.append("no rotary module")
    if asked.softmax_scales:
        lines.append(f"softmax scale {', '.join(f'{s:.6g}' for s in asked.softmax_scales)}")
    lines.append(f"frequencies change with the length: {'yes' if asked.changes else 'no'}")
    return lines


def report_without_judgement(headline: str, why: str) -> Report:
    """Return that a file was not judged. why: the reason, for programs."""
    facts = {"judged": False, "why": why}
    return Report("What runtimes compute from a file", headline, facts, [])


def report_of_comparison(
    paths: Sequence[Path],
    records: tuple[PositionRecord, PositionRecord],
    differences: Sequence[str],
    length_in_words: str,
) -> Report:
    """Return how the positions of two files differ.

    differences: a line for each. length_in_words: at which they are the same; "" for any.
    """
    names_in_words = " and ".join(str(path) for path in paths)
    headline = f"{names_in_words} mean the same positions{length_in_words}."
    if differences:
        headline = f"{names_in_words} mean other positions:"
    facts = {
        "same": not differences,
        "differences": list(differences),
        "records": [record.as_json() for record in records],
    }
    return report_of_lines("Two files", headline, differences, facts)


def report_of_position_ids(
    path: Path, differences: Sequence[str], notes: Sequence[str], family: str
) -> Report:
    """Return how the position ids of a batch differ from those that a family's code makes.

    path: the file with the batch. differences: a line for each; none if they are the same. notes:
    where the code of runtimes differs from the paper, with whose ids the batch is then compared.
    family: its model_type.
    """
    makers = "the paper makes" if notes else f"the code of {family} makes"
    headline = f"{path}: position ids are as {makers} them."
    if differences:
        headline = f"{path}:"
    facts = {"same": not differences, "differences": list(differences), "notes": list(notes)}
    lines = [*differences, *(f"note: {note}" for note in notes)]
    return report_of_lines("Position ids of a batch", headline, lines, facts)


def report_of_options(server: str, command_line: str) -> Report:
    """Return the options with which a server computes what a file means."""
    facts = {"server": server, "options": command_line}
    return Report(f"Options of {server}", command_line, facts, [])


def report_of_rule(rule: Rule) -> Report:
    """Return the page of a rule, with its severity below the title."""
    title, _, page = rule.page.partition("\n")
    text = f"Severity: {SEVERITIES[rule.severity]}.\n{page}".rstrip()
    facts = {"code": rule.code, "title": rule.title, "text": f"{title}\n\n{text}"}
    return Report(rule.code, title, facts, [Section("", [Code(f"\n{text}")])])


def report_of_layout(verdict: "LayoutVerdict") -> Report:
    """Return which layout the rows of q and k have, by the losses of the model."""
    facts = {
        "expected": verdict.expected,
        "found": verdict.found,
        "loss_as_is": verdict.losses[0],
        "loss_permuted": verdict.losses[1],
        "tokens": verdict.num_tokens,
        "why": verdict.why,
    }
    return Report("Layout of the rows of q and k", _layout_in_words(verdict), facts, [])


def _layout_in_words(verdict: "LayoutVerdict") -> str:
    """Return which layout the rows have, and what to do where the family's code expects another."""
    if verdict.found is None:
        return f"layout unknown: {verdict.why}"
    loss_as_they_are, loss_permuted = verdict.losses
    verdict_in_words = (
        f"the family's code expects {verdict.expected} rows of q and k, and they are "
        f"{verdict.found}: {loss_as_they_are:.2f} nats per token as they are, {loss_permuted:.2f} "
        f"permuted, on {verdict.num_tokens} tokens"
    )
    if not verdict.mismatch:
        return verdict_in_words
    return f"E PD036  {verdict_in_words}; --convert-layout {verdict.expected} --out NEW mends it"


def report_of_lines(
    title: str,
    headline: str,
    lines: Sequence[str],
    facts: Mapping[str, Any],
    indent: str = "  ",
) -> Report:
    """Return a headline and lines below it."""
    blocks = [Items([f"{indent}{line}" for line in lines])] if lines else []
    return Report(title, headline, facts, [Section("", blocks)])


def report_of_several(
    paths: Sequence[Path], reports: Sequence[Report], num_not_judged: int
) -> Report:
    """Return the reports about several files in one.

    reports: one for each path. num_not_judged: files whose families posenc does not know.
    """
    sections = []
    for path, report in zip(paths, reports, strict=True):
        blocks = [block for section in report.sections for block in section.blocks]
        sections.append(Section(str(path), [report.headline, *blocks, *report.cautions, ""]))
    cautions = []
    if num_not_judged:
        cautions.append(
            f"notice: {num_not_judged} of {len(paths)} files were not judged, see above."
        )
    facts = {str(path): report.facts for path, report in zip(paths, reports, strict=True)}
    return Report("What runtimes compute from files", "", facts, sections, cautions=cautions)
