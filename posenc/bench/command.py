"""Define the options of `posenc bench`; torch is imported only when the command runs."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from posenc.command_line.options import Json, option, require_choice

if TYPE_CHECKING:
    from posenc.bench.cases import Case

_MAX_DEFAULT_CASE_BYTES = 2 * 10**9
"""Maximum bytes of the tensors of a case that no option asked for."""
_MAX_DEFAULT_CASE_SECONDS = 60
"""Maximum seconds of a case that no option asked for."""
_MAX_QUICK_CASE_SECONDS = 10
"""The same with --quick."""


class _Rounds(NamedTuple):
    """How often a case is measured: `min_rounds` rounds in any case, then more until there are
    `max_rounds` or `max_seconds` have passed."""

    max_rounds: int
    max_seconds: float
    min_rounds: int


_ROUNDS = _Rounds(101, 10.0, 7)
_QUICK_ROUNDS = _Rounds(15, 1.0, 3)
_DEVICE_LENGTHS = (2048, 8192)
"""Lengths that --device times."""
_LONG_DEVICE_LENGTHS = (32_768, 65_536)
"""Lengths that --device times with --all only."""
_NUM_DEVICE_HEADS = 16
"""Heads that --device times without --heads: chosen."""
_DEVICE_BUDGET_SECONDS = 270.0
"""Seconds after which --device begins no further check of results, and seconds after which it then
begins no further case to time. Both together take about ten minutes, because what has begun is
finished."""
_CALLS_PER_SECOND_LIMIT = 10_000
"""Calls per second that no core reaches."""
_OPERATIONS_PER_SECOND_LIMIT = 1e11
"""Operations per second that no core reaches. At this speed a case takes the least time that it
can take anywhere; it is refused if that alone is more than a week."""


def bench(
    only: Annotated[
        str | None,
        option(
            "Groups of cases, separated by commas: attention, backward, memory, layer, "
            "rotation, decode, training, attach. Default: all."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        option("Lengths in tokens instead of each case's own: 1024,4096.", panel="Data"),
    ] = None,
    heads: Annotated[int | None, option("Query heads of each case.", min=1, panel="Model")] = None,
    kv_heads: Annotated[int | None, option("Key heads of each case.", min=1, panel="Model")] = None,
    head_dim: Annotated[int | None, option("Channels of a head.", min=2, panel="Model")] = None,
    threads: Annotated[
        str,
        option("Number of torch's threads; 1,2 measures with one and with two.", panel="Where"),
    ] = "1",
    repeats: Annotated[
        int | None,
        option("Rounds of each case; 7 to 101 in ten seconds by default.", min=1, max=10**9),
    ] = None,
    device: Annotated[
        str | None,
        option(
            "Check every encoding on cuda (or cpu, to try the command) against float64 on the "
            "CPU, then time its kernels. Takes --lengths, --heads, --all, --out and --json only.",
            panel="Where",
        ),
    ] = None,
    quick: Annotated[
        bool, option("3 to 15 rounds in a second; small cases only.", "--quick")
    ] = False,
    include_large: Annotated[
        bool, option("Also cases that take more than a minute or 2 GB.", "--all")
    ] = False,
    out: Annotated[
        Path | None,
        option("Write everything to this JSON file, after each case.", panel="Output"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what position encodings cost on this machine.

    Compares attention with attention without positions, a rotation with a copy, a model with Llama.
    Each ratio is a median over interleaved rounds with its 95 % interval. One thread is measured in
    CPU time, several in wall time.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keep torch's profiler from writing to stderr
    chosen_lengths = () if lengths is None else _parse_numbers("--lengths", lengths, "1024,4096")
    if device is not None:
        _refuse_beside_device(
            {
                "--only": only is not None,
                "--kv-heads": kv_heads is not None,
                "--head-dim": head_dim is not None,
                "--repeats": repeats is not None,
                "--quick": quick,
                "--threads": threads != "1",
            }
        )
        _check_and_time_device(
            device, chosen_lengths, heads or _NUM_DEVICE_HEADS, include_large, out, as_json
        )
        return
    groups = _chosen_groups(only)
    if head_dim is not None and head_dim % 2:
        raise ValueError(f"bench: --head-dim needs an even number, got {head_dim}.")
    thread_counts = _thread_counts(threads)
    from posenc.bench.cases import select_cases
    from posenc.files.atomic import prepare_results

    cases = select_cases(groups, chosen_lengths, heads, kv_heads, head_dim)
    cases, notes = _runnable_cases(cases, refuses=only is not None)
    rounds = _rounds_of_options(quick, repeats)
    asks_for_large_cases = include_large or only is not None or lengths is not None
    max_seconds = _MAX_QUICK_CASE_SECONDS if quick else _MAX_DEFAULT_CASE_SECONDS
    cases, more_notes = _cases_within_limits(
        cases, thread_counts, rounds, max_seconds, keeps_large=asks_for_large_cases
    )
    if out is not None:
        prepare_results(out, _RESULTS_PREFIX)
    print(*notes, *more_notes, sep="\n", file=sys.stderr)
    _measure_cases(cases, thread_counts, rounds, out, as_json)


def _refuse_beside_device(options: Mapping[str, bool]) -> None:
    """Raise ValueError for the first option that is given beside --device. options: True by the
    name of each option that is given."""
    for name, is_given in options.items():
        if is_given:
            raise ValueError(f"bench: --device does not take {name}.")


def _rounds_of_options(quick: bool, repeats: int | None) -> _Rounds:
    """Return how often each case is measured: `repeats` rounds if it is not None, else as --quick
    or its absence says."""
    if repeats:
        return _Rounds(repeats, float("inf"), repeats)
    return _QUICK_ROUNDS if quick else _ROUNDS


def _chosen_groups(only: str | None) -> tuple[str, ...]:
    """Return the groups of cases that --only names, or all if it is None. Raise ValueError for an
    unknown name."""
    from posenc.bench.cases import GROUPS

    if only is None:
        return tuple(GROUPS)
    groups = _comma_separated(only)
    for name in groups:
        require_choice("--only", name, GROUPS)
    return groups


def _thread_counts(threads: str) -> tuple[int, ...]:
    """Return the numbers of --threads. Raise ValueError for one above the cores of this machine."""
    from posenc.machine.hardware import num_cores

    counts = _parse_numbers("--threads", threads, "1,2")
    num_cores_here = num_cores()
    if max(counts) > num_cores_here:
        raise ValueError(
            f"bench: --threads must be at most {num_cores_here}, the cores here, got {max(counts)}."
        )
    return counts


def _measure_cases(
    cases: "Sequence[Case]",
    thread_counts: Sequence[int],
    rounds: _Rounds,
    out: Path | None,
    in_json: bool,
) -> None:
    """Measure the cases one by one. After each, print its table, unless `in_json`, and write the
    results of all so far to the file `out`, unless it is None. With `in_json`, print one object at
    the end."""
    from posenc.bench import measure
    from posenc.bench.report import NEXT_COMPARED, measured_sections, report_of
    from posenc.files.atomic import write_atomically
    from posenc.report.report import section_on_training
    from posenc.report.terminal import print_line, print_report, show_section, stdout_console

    console = stdout_console(80)
    machine = measure.machine_facts()
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows_of_case = [
            _case_columns(case) | row for row in measure.measure_case(case, thread_counts, rounds)
        ]
        rows += rows_of_case
        if not in_json:
            for section in measured_sections(rows_of_case):
                show_section(section, console)
        if out is not None:
            write_atomically(out, _results_as_json(machine, rows))
    report = report_of(machine, rows)
    if in_json:
        print_report(report, in_json=True)
    else:
        print_line(console, report.headline)
        show_section(section_on_training(NEXT_COMPARED), console)


def _check_and_time_device(
    device: str,
    lengths: Sequence[int],
    heads: int,
    include_longest: bool,
    out: Path | None,
    in_json: bool,
) -> None:
    """Check and time the encodings on a device. Exit with 1 if a result is wrong.

    device: "cpu" or "cuda".
    lengths: tokens; empty for those that the module chooses.
    include_longest: with --all, the module's longest lengths, too.
    out: the file of results; None for one with the name of the device.
    """
    from posenc.bench.report import report_of
    from posenc.command_line.progress import replace_status_line
    from posenc.files.atomic import prepare_results, write_atomically
    from posenc.machine.hardware import check_device
    from posenc.report.terminal import print_line, print_report, stderr_console

    require_choice("--device", device, ("cpu", "cuda"))
    if device == "cuda":
        check_device(device)
    machine, dtypes = _machine_and_dtypes(device)
    device_name = "-".join(re.findall(r"[A-Za-z0-9]+", machine["device"]))
    out = Path(f"bench-{device_name}.json") if out is None else out
    prepare_results(out, _RESULTS_PREFIX)
    rows: list[dict[str, Any]] = []
    for row in _device_rows(device, lengths, heads, include_longest, dtypes):
        rows.append(row)
        replace_status_line(f"bench: {len(rows)} results")
        write_atomically(out, _results_as_json(machine, rows))
    replace_status_line("")
    print_report(report_of(machine, rows), in_json)
    print_line(stderr_console(), f"Results: {out}")
    if any(row.get("ok") is False for row in rows):
        raise typer.Exit(1)


def _device_rows(
    device: str, lengths: Sequence[int], heads: int, include_longest: bool, dtypes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Check every encoding on a device, then time its kernels. Yield each row as it is measured:
    those of `rows_of_checks`, then those of `measure_case` with what `_case_columns` says. The
    arguments are those of `_check_and_time_device`."""
    from posenc.bench import cases, device_check

    all_but_longest = device_check.LENGTHS[:-1]
    checked_lengths = lengths or (device_check.LENGTHS if include_longest else all_but_longest)
    yield from device_check.rows_of_checks(device, checked_lengths, dtypes, _DEVICE_BUDGET_SECONDS)
    timed_lengths = lengths or _DEVICE_LENGTHS + (_LONG_DEVICE_LENGTHS if include_longest else ())
    start_time = time.perf_counter()
    for case in cases.device_cases(device, timed_lengths, heads, dtypes[-1]):
        is_late = time.perf_counter() - start_time > _DEVICE_BUDGET_SECONDS
        for row in [{"left_out": "out of time"}] if is_late else _timing_rows(case):
            yield _case_columns(case) | row


def _timing_rows(case: "Case") -> list[dict[str, Any]]:
    """Return the rows of a case that is timed on a device. If an error ends it, return one row with
    the `error` as text, and `ok` False."""
    from posenc.bench import device_check, measure

    try:
        return measure.measure_case(case, (1,), _QUICK_ROUNDS)
    except Exception as error:  # such as too little memory; the others are measured
        return [{"error": device_check.type_and_first_line(error), "ok": False}]


def _machine_and_dtypes(device: str) -> tuple[dict[str, Any], list[str]]:
    """Return what the results say of the machine, and the dtypes that its device multiplies."""
    import torch

    from posenc.bench import measure
    from posenc.machine.hardware import default_precision

    machine = measure.machine_facts() | {"matmul": torch.get_float32_matmul_precision()}
    dtypes = ["float32", "bfloat16"]
    if device == "cuda":
        machine["device"] = torch.cuda.get_device_name()
        if default_precision(device) != "bfloat16":
            dtypes = ["float32"]
            note = f"bfloat16 is left out: {machine['device']} does not multiply it."
            print(note, file=sys.stderr)
    return machine, dtypes


def _runnable_cases(cases: "list[Case]", *, refuses: bool) -> "tuple[list[Case], list[str]]":
    """Return the cases that this machine and its packages can run, and a line for each that they
    cannot.

    refuses: raise ValueError for a case whose package is missing, because --only named its group.
    """
    from importlib.util import find_spec

    from posenc.bench.cases import GROUPS_WITH_TRANSFORMERS
    from posenc.lazy import require_package
    from posenc.machine.hardware import cpu_multiplies_bfloat16

    lacks_transformers = find_spec("transformers") is None
    runnable: list[Case] = []
    notes: list[str] = []
    for case in cases:
        missing_requirement = ""
        if lacks_transformers and case.group in GROUPS_WITH_TRANSFORMERS:
            if refuses:
                require_package("transformers", f"bench: {case.group}")
            missing_requirement = "transformers"
        elif case.group == "training" and case.dtype == "bfloat16":
            missing_requirement = "" if cpu_multiplies_bfloat16() else "a CPU with bfloat16"
        if missing_requirement:
            notes.append(f"bench: {case.group} {case.title} needs {missing_requirement}: left out")
        else:
            runnable.append(case)
    return runnable, notes


def _cases_within_limits(
    cases: "list[Case]",
    thread_counts: Sequence[int],
    rounds: _Rounds,
    max_seconds: float,
    *,
    keeps_large: bool,
) -> "tuple[list[Case], list[str]]":
    """Return the cases to run, and lines for the user: one for each large case, and one with the
    estimated duration of all that run. A case is large if it takes more than `max_seconds`, or
    tensors of more than _MAX_DEFAULT_CASE_BYTES.

    thread_counts: the numbers of threads with which each case is measured.
    keeps_large: run large cases, because an option asked for them; if False they are left out.
    Raises: ValueError for a case that needs more memory than there is, or more than a week.
    """
    from posenc.machine.hardware import (
        check_memory_or_disk,
        check_time,
        memory_bytes,
        readable_size,
    )

    advice = "Take smaller --lengths, --heads or --head-dim, or fewer --repeats."
    selected: list[Case] = []
    notes: list[str] = []
    total_seconds = 0.0
    for case in cases:
        case_name = f"{case.group} {case.title}"
        least_bytes = case.min_bytes()
        check_memory_or_disk(f"bench: tensors of {case_name}", least_bytes, memory_bytes(), advice)
        # Memory is measured in one call: it does not vary as time does.
        rounds_of_case = _Rounds(1, 0.0, 1) if case.group == "memory" else rounds
        expected_seconds = sum(
            _expected_seconds(case, rounds_of_case, num_threads) for num_threads in thread_counts
        )
        least_seconds = int(_least_seconds(case, rounds_of_case, thread_counts))
        check_time(f"bench: {case_name}", least_seconds, False, advice)
        is_large = expected_seconds > max_seconds or least_bytes > _MAX_DEFAULT_CASE_BYTES
        if is_large:
            cost_in_words = (
                f"{_describe_duration(expected_seconds)}, at least {readable_size(least_bytes)}"
            )
            notes.append(f"bench: {'' if keeps_large else 'left out '}{case_name}: {cost_in_words}")
        if keeps_large or not is_large:
            selected.append(case)
            total_seconds += expected_seconds
    left_out_clause = "; --all or --only runs those left out" if len(selected) < len(cases) else ""
    cases_in_words = f"{len(selected)} {'case' if len(selected) == 1 else 'cases'}"
    return selected, [
        *notes,
        f"bench: {cases_in_words}, {_describe_duration(total_seconds)}{left_out_clause}",
    ]


def _least_seconds(case: "Case", rounds: _Rounds, thread_counts: Sequence[int]) -> float:
    """Return a lower bound of the seconds that a case takes, measured with all `thread_counts`: its
    operations and calls on cores that are faster than any.

    That short calls run twice in a round, see `_expected_seconds`, is not counted: the bound stays
    a lower one.
    """
    seconds = 0.0
    for num_threads in thread_counts:
        num_rounds = rounds.min_rounds + 1
        seconds += num_rounds * case.round_seconds(num_threads, _OPERATIONS_PER_SECOND_LIMIT)
    # However small its tensors, no call takes less than a tenth of a millisecond.
    return seconds + rounds.min_rounds / _CALLS_PER_SECOND_LIMIT


def _expected_seconds(case: "Case", rounds: _Rounds, num_threads: int) -> float:
    """Estimate the seconds of a case with one number of threads, including its first calls, which
    take longer than later rounds."""
    round_seconds = case.round_seconds(num_threads)
    # A short call runs twice in each round, see measure.time_interleaved_rounds. The first, slow
    # calls count for one such round.
    seconds_of_fewest_rounds = 2 * (rounds.min_rounds + 1) * round_seconds
    return max(seconds_of_fewest_rounds, min(rounds.max_seconds, rounds.max_rounds * round_seconds))


_RESULTS_PREFIX = '{"machine": '
"""Begins a file of results."""


def _results_as_json(machine: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the measured numbers as JSON with one line for each row."""
    joined_rows = ",\n".join(map(json.dumps, rows))
    return f'{_RESULTS_PREFIX}{json.dumps(machine)},\n"rows": [\n{joined_rows}\n]}}\n'


def _case_columns(case: "Case") -> dict[str, Any]:
    """Return what each row of a case's results says of the case: its title, group and sizes."""
    columns = asdict(case) | {"kv_len": case.num_keys}
    for left_out_column in ("runs", "baselines"):
        del columns[left_out_column]
    return {"case": case.title} | columns


def _describe_duration(seconds: float) -> str:
    """Return an estimated time in words, in seconds or minutes."""
    if seconds < 10:  # the first calls take longer than the rounds
        return "a few seconds"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} minutes"


def _comma_separated(text: str) -> tuple[str, ...]:
    """Return the parts of an option's value between commas, each once, without spaces around it."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _parse_numbers(option: str, text: str, example: str) -> tuple[int, ...]:
    """Return the numbers of an option. Raises: ValueError, with an example, for anything else."""
    try:
        numbers = tuple(int(part) for part in _comma_separated(text))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError(f"bench: {option} needs whole numbers like {example}, got {text!r}.")
    return numbers
