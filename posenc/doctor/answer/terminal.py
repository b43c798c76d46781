"""Format what the command prints, as text and as JSON."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from posenc.dialects.ask import Asked
from posenc.dialects.computed import ComputedPositions
from posenc.dialects.runtimes import RUNTIMES
from posenc.doctor.case import Case
from posenc.doctor.rule import SEVERITIES, Finding, Rule

WIDTH = 100
"""Columns at which findings are wrapped."""
TOO_LONG = "PD064"
"""The rule about a text that is too long, for which no copy is written."""
COMMAND = "    "
"""Begins a line of a cure that is to be copied, and is not wrapped."""
LEGEND = (
    "multiplier: of cos and sin. switch: when the frequencies change. admits: the longest sequence."
)
HEADER = (
    "runtime",
    "how, version",
    "frequencies",
    "multiplier",
    "softmax scale",
    "switch",
    "admits",
)


def as_json(
    case: Case, found: Sequence[Finding], silenced: Sequence[Finding] = ()
) -> dict[str, Any]:
    """Return the object that --json prints. found: the findings that count; silenced: those of
    rules that --ignore names."""
    return {
        "record": None if case.record is None else case.record.as_json(),
        "rules": [finding.as_json() for finding in found],
        "ignored": [finding.as_json() for finding in silenced],
        "runtimes": {name: computed.as_json() for name, computed in case.computed.items()},
    }


def answer_for_terminal(
    case: Case, found: Sequence[Finding], silenced: Sequence[Finding] = (), *, fixes: bool = True
) -> str:
    """Return the answer for a terminal.

    silenced: findings of the rules of --ignore. fixes: True if --fix writes a copy.
    """
    lines = [_headline(case), ""]
    lines += _table_lines(
        [HEADER, *(_table_row(case, name) for name in RUNTIMES if name in case.named)]
    )
    lines += ["", LEGEND]
    lines += _emulator_contradiction_lines(case)
    if case.record is not None and case.record.doubts:
        lines += ["", *(f"assumed: {doubt}" for doubt in case.record.doubts)]
    for finding in found:
        lines += ["", *_finding_lines(finding)]
    if silenced:
        lines += ["", f"ignored, as --ignore asks: {_counts_by_rule(silenced)}"]
    return "\n".join([*lines, "", _closing_line(case, found, bool(silenced), fixes=fixes)])


def _headline(case: Case) -> str:
    """Return the first lines of the answer: the lengths and rotations that the file means, or why
    they cannot be told."""
    path = case.source.path
    if case.record is None:
        return f"{path}: {case.why_unclear or 'cannot tell what it means'}"
    record = case.record
    kinds = []
    for kind in record.kinds:
        slowest = min((f for f in kind.inv_freq if f), default=0.0)
        name = "" if kind.name == "all" else f"{kind.name}: "
        kinds.append(
            f"{name}{kind.rotary_dim} channels, slowest pair {slowest:.4g} radians per position, "
            f"multiplier {kind.multiplier:.6g}"
        )
    if not record.kinds:
        kinds.append("no layer rotates")
    if case.metadata is None and case.model.indexer_is_interleaved is not None:
        words = {True: "interleaved", False: "half-split"}
        kinds.append(
            f"indexer: {words[case.model.indexer_is_interleaved]} pairs, the attention's are "
            f"{words[case.model.interleaved]}; seen beyond index_topk tokens only"
        )
    return (
        f"{path}: {record.model_type}, trained at {record.trained_length} tokens, meant for "
        f"{record.max_length}; judged at {record.length}\n" + "\n".join(f"  {k}" for k in kinds)
    )


def _how_and_version(computed: ComputedPositions) -> str:
    """Return how an answer was found, and of which version it is: "asked, 5.24.0" where the runtime
    itself answered, "known, 0.33.0" where posenc's emulator did."""
    return f"{'asked' if computed.asked else 'known'}, {computed.version}"


def _emulator_contradiction_lines(case: Case) -> list[str]:
    """Return lines about each runtime whose own answer differs from posenc's emulator of it."""
    lines = []
    for name, aspects in case.aspects_that_contradict_emulator.items():
        lines += [
            "",
            f"{name} {case.computed[name].version} itself answers otherwise than posenc recorded "
            f"for this version ({', '.join(sorted(aspects))}). The table shows its own answer; the "
            "record is wrong: please report it.",
        ]
    return lines


def answers_of_asked_runtimes(case: Case, why: str) -> str:
    """Return what the asked runtimes compute, for a family whose meaning posenc does not know."""
    lines = [f"{case.source.path}: {why}. What the runtimes at hand compute, asked themselves:"]
    for name, asked in case.own_answers.items():
        lines += ["", f"{name} {asked.version}, asked: {asked.model or 'no answer'}"]
        refusal = asked.refuses or asked.stops
        if refusal:
            lines.append(f"  refuses: {refusal}")
        elif asked.unmeasured:
            lines.append(f"  not measured: {asked.unmeasured}")
        else:
            lines += _lines_of_measurement(case.computed[name], asked)
    return "\n".join(lines)


def _lines_of_measurement(computed: ComputedPositions, asked: Asked) -> list[str]:
    """Return the lines about what one installed runtime computes, as it was measured in it."""
    lines: list[str] = []
    if not computed.layers:
        lines.append("  no rotary module")
    for kind, layer in computed.layers.items():
        of_kind = "" if kind == "all" else f"{kind}: "
        slowest = min((f for f in layer.inv_freq if f), default=0.0)
        lines.append(
            f"  {of_kind}{2 * len(layer.inv_freq)} channels, slowest pair {slowest:.4g} "
            f"radians per position, multiplier {layer.multiplier:.6g}"
        )
    if asked.softmax_scales:
        lines.append(f"  softmax scale {', '.join(f'{s:.6g}' for s in asked.softmax_scales)}")
    lines.append(f"  frequencies change with the length: {'yes' if asked.changes else 'no'}")
    return lines


def _table_row(case: Case, name: str) -> tuple[str, ...]:
    """Return the cells of a runtime's line, as HEADER names them."""
    computed = case.computed[name]
    differing = case.differences[name]
    source = _how_and_version(computed)
    if not computed.is_known:
        return (name, source, computed.status_in_words, "", "", "", "")
    if computed.error is not None:
        return (name, source, "refuses", "", "", "", _longest_sequence_in_words(computed))
    rotates_otherwise = {"pairs", "frequencies", "layers"} & differing
    frequencies = "other" if rotates_otherwise else "as meant"
    layers = [] if _rotates_nothing(case, computed) else list(computed.layers.values())
    multipliers = ", ".join(dict.fromkeys(f"{layer.multiplier:.6g}" for layer in layers))
    scale = "" if computed.softmax_scale is None else f"{computed.softmax_scale:.6g}"
    return (
        name,
        source,
        "" if case.meaning is None else frequencies,
        multipliers + (" (other)" if "multiplier" in differing else ""),
        scale + (" (other)" if "scale" in differing else ""),
        computed.switch,
        _longest_sequence_in_words(computed),
    )


def _rotates_nothing(case: Case, computed: ComputedPositions) -> bool:
    """Return True if no layer of a config's model rotates in a runtime, whatever its rope dict."""
    return case.metadata is None and len(computed.without_rotation) >= case.model.num_layers


def _longest_sequence_in_words(computed: ComputedPositions) -> str:
    """Return the longest sequence that a runtime admits, in words."""
    return "any length" if computed.max_length is None else str(computed.max_length)


def _table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _finding_lines(finding: Finding) -> list[str]:
    """Return the lines of a finding: its message and its cure, below each other."""
    first = f"{finding.severity} {finding.code}  "
    indent = " " * len(first)
    width = WIDTH - len(first)
    body = _wrap(finding.message, width)
    cure: list[str] = []
    for line in f"cure: {finding.cure}".split("\n"):
        cure += [line] if line.startswith(COMMAND) else _wrap(line, width)
    return [first + body[0], *(indent + line for line in (*body[1:], *cure))]


def _counts_by_rule(silenced: Sequence[Finding]) -> str:
    """Return how often each rule fired, such as "PD017 (1 error), PD013 (2 warnings)"."""
    counts = Counter((finding.code, SEVERITIES[finding.severity]) for finding in silenced)
    return ", ".join(f"{code} ({n} {word}{'s' * (n != 1)})" for (code, word), n in counts.items())


def _closing_line(case: Case, found: Sequence[Finding], silenced: bool, *, fixes: bool) -> str:
    """Return the last line: how many findings there are, and what to do next."""
    errors = sum(f.severity == "E" for f in found)
    warnings = sum(f.severity == "W" for f in found)
    unread = case.named_runtimes_known_as("unknown")
    rest = f" Not known to posenc, and not judged: {', '.join(unread)}." if unread else ""
    if case.is_opened_by_no_runtime:
        rest += (
            f" No named runtime opens {case.source.path.name}: convert the model, and compare: "
            f"`posenc doctor {case.source.path} CONVERTED`."
        )
    if case.metadata is not None:
        rest += f" `posenc doctor {case.source.path} FOLDER` compares it with its model's folder."
    if not found:
        if case.is_opened_by_no_runtime:
            return rest.strip()
        nothing = "Nothing else to complain about" if silenced else "Nothing to complain about"
        longer = ""
        if case.length is None and case.meaning is not None and case.meaning.computed.layers:
            longer = " `--length N` judges a longer text, and says what scaling it needs."
        return f"{nothing}, for {', '.join(case.judged_runtimes)}.{rest}{longer}"
    counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}."
    mendable = any(f.severity == "E" and f.code != TOO_LONG for f in found)
    mend = " `--fix --out NEW` writes a mended copy, or says why not." if fixes and mendable else ""
    return f"{counts} `posenc doctor --explain {found[0].code}` tells more.{mend}{rest}"


def explanation(rule: Rule) -> str:
    """Return what --explain prints of a rule: its page, with its severity below the title."""
    title, _, rest = rule.page.partition("\n")
    return f"{title}\n\nSeverity: {SEVERITIES[rule.severity]}.\n{rest}".rstrip()


def _wrap(text: str, width: int) -> list[str]:
    """Wrap text at whole words, so that keys and runtime names are not split."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
