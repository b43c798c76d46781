"""What a study leaves open: facts that limit its answer, and the sentences that say them, which are
the second line of an answer."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_high

from posenc.compare.judging import sentences
from posenc.compare.judging.context_use import context_use
from posenc.compare.judging.judgement import (
    bits_that_may_turn,
    judge,
    moves_of_leads,
)
from posenc.compare.judging.near_far import Places, near_and_far
from posenc.compare.judging.sentences import with_interval
from posenc.compare.judging.served_by import SERVERS, has_learned_slopes, servers_of
from posenc.compare.judging.standing import (
    MARGIN,
    Standing,
    standing_of_tasks,
)
from posenc.compare.judging.summary import (
    bits_saved_by_doubling,
    falls_since_half,
    is_doubling_measured,
    summarise,
)
from posenc.compare.judging.tuning import sentences_on_longer_trainings, sentences_on_tuning
from posenc.compare.results import RateCheck, Study, TrialResult
from posenc.compare.rows import plain_name, rows_by_name, rows_of
from posenc.compare.sources import GivenTable
from posenc.compare.trial.config import TrialConfig
from posenc.report.report import join_names, list_up_to_six, number_word
from posenc.statistics.seed_intervals import Gap
from posenc.tasks.registry import TEXT

LAST_RECIPE_OF_UNSCALED_T5 = 5
"""The last recipe in which `t5` meant what is `t5:unscaled=true` now."""
ROPE = "rope"
"""The encoding whose readings in a window and after a tuning are baselines."""
HYBRIDS = ("rnope", "rnope_swa", "irope")
"""Encodings by layer that people train: rotated layers with layers without positions."""
_MEANING_OF_COLUMN = {
    "size": "the size of the models",
    "steps": "steps",
    "seconds": "seconds of training",
    "position": "losses by position",
}
"""What is not known if a column is not there."""
_NEVER_IN_A_TABLE = (
    "how each encoding was tuned",
    "whether documents were kept apart",
    "losses of single windows",
)


def limits_in_words(study: Study) -> str:
    """Return what the study leaves open: its few seeds, texts and tasks, its small model, its short
    training, what was not tested, and encodings that are not in the verdict."""
    if not study.finished:
        return ""
    return " ".join(
        [
            *sentences_on_longer_trainings(study),
            *limit_sentences(limits_of(study)),
            *sentences_on_tuning(study),
            *_sentences_on_servers(study),
            *_sentences_on_exclusions(study),
        ]
    )


def _sentences_on_servers(study: Study) -> Iterator[str]:
    """Yield the sentence on the servers without a decoder of the encoding to take, and on the best
    rows that all of them run, together with those that do not differ significantly."""
    if not any(result.config.task == TEXT for result in study.finished):
        return
    judgement = judge(study)
    standing = judgement.places.far or judgement.places.near
    if judgement.taken is None or standing is None:
        return
    places = judgement.places
    servers_of_taken = servers_of(places.text_of_row(judgement.taken))
    if study.table is not None and not servers_of_taken:
        return  # a table names encodings as it likes, and of this name nothing is known
    servers_without = [server for server in SERVERS if server not in servers_of_taken]
    if not servers_without:
        return
    best_served = _best_served_rows(standing, places, servers_without)
    rows_ahead = _rows_ahead_of(best_served, standing)
    unserved_rows = _unserved_rows([judgement.taken, *rows_ahead], places, servers_without)
    pair_gap = None
    if len(best_served) == 2:
        pair_gap = standing.gap(best_served[1], best_served[0])
    yield sentence_on_servers(
        list(dict.fromkeys(places.encoding_of[row] for row in unserved_rows)),
        servers_without,
        {name: standing.gap(name) for name in best_served},
        standing.order[0],
        pair_gap,
        any(has_learned_slopes(places.text_of_row(row)) for row in unserved_rows),
    )


def _best_served_rows(standing: Standing, places: Places, servers: Sequence[str]) -> list[str]:
    """Return the best row that all of these servers run, and those that do not differ significantly
    from it; [] if they run none."""
    served_rows = [
        name for name in standing.order if {*servers} <= {*servers_of(places.text_of_row(name))}
    ]
    return [name for name in served_rows if (name, served_rows[0]) not in standing.worse_pairs]


def _rows_ahead_of(rows: Sequence[str], standing: Standing) -> tuple[str, ...]:
    """Return the rows of a standing with a better mean than the first of `rows`; () if there are
    none of these."""
    return standing.order[: standing.order.index(rows[0])] if rows else ()


def _unserved_rows(rows: Sequence[str], places: Places, servers: Sequence[str]) -> list[str]:
    """Return the rows whose encoding none of the servers runs."""
    return [row for row in rows if not {*servers} & {*servers_of(places.text_of_row(row))}]


def _sentences_on_exclusions(study: Study) -> Iterator[str]:
    """Yield sentences that name the encodings that run at no tested length, and those without a
    rank because a trial is missing."""
    summaries = summarise(study.of_task(TEXT))
    encodings_nowhere = [
        summary.encoding
        for summary in summaries
        if all(length_summary.mean is None for length_summary in summary.by_length)
    ]
    if encodings_nowhere and len(encodings_nowhere) < len(summaries):
        yield sentences.sentence_on_running_nowhere(encodings_nowhere)
    places = near_and_far(study)
    near_only_encodings = []
    if places.near is not None and places.far is not None:
        far_encodings = {places.encoding_of[name] for name in places.far.order}
        near_encodings = {places.encoding_of[name] for name in places.near.order}
        near_only_encodings = [
            name for name in study.encodings if name in near_encodings - far_encodings
        ]
    if near_only_encodings:
        yield sentence_on_running_only_near(
            near_only_encodings, places.far.where if places.far else "", study.table
        )
    for name, (task, seed) in _first_missing_trials(study).items():
        yield sentence_on_missing_rank(name, task, seed)


def _first_missing_trials(study: Study) -> dict[str, tuple[str, int]]:
    """Return, for each encoding without a rank, the first task and seed for which it has no
    result. An encoding is ranked with results of all tasks, for each seed of the ranked ones."""
    overall_standing = standing_of_tasks(study)
    ranks_by_encoding = overall_standing.pairs.values if overall_standing else {}
    ranked_seeds = next(iter(ranks_by_encoding.values()), ())  # the same for every ranked encoding
    configs = [result.config for result in study.finished]
    finished_trials = {(config.task, config.seed, config.encoding) for config in configs}
    unranked_encodings = {config.encoding for config in configs} - ranks_by_encoding.keys()
    tasks = {config.task for config in configs}
    needed_trials = set(itertools.product(tasks, ranked_seeds, unranked_encodings))
    first_missing: dict[str, tuple[str, int]] = {}
    for task, seed, encoding in sorted(needed_trials - finished_trials, reverse=True):
        first_missing[encoding] = (task, seed)  # what comes first is written last, and stays
    return first_missing


@dataclass(frozen=True)
class StudyLimits:
    """Facts that limit an answer. Seven points must hold for it to transfer to a larger model;
    their numbers are in brackets, and those that do not hold are named. No study holds point 4: the
    time on the hardware and servers of the user.

    num_seeds: of an encoding, for the task that has the fewest. num_tasks: generated ones.
    num_parameters, num_steps: of the models; None if unknown, num_steps also if trials differ.
    saved_bits: the least and the most bits per byte that any encoding's last half of the steps
        saved, or that their last doubling saved in separate, shorter trainings; None if unknown.
    doubling_is_measured: by such trainings.
    turnable_bits: bits of difference that another doubling may turn; None if unknown.
    taken_encoding: the encoding of the row to take; "" if there is none.
    moves_of_leads: by how many bits its leads moved with the last doubling, by the row behind it.
    first_seed_chose: the trials with the first seed are those that a search chose, so only other
        seeds are independent of the choice.
    rates_searched: each encoding has a learning rate of its own, chosen by validation. (1)
    knobs_searched: so has its own knob, the factor of its tables, RoPE's base, ALiBi's slopes or
        T5's scale. (1)
    has_retrieval: generated tasks ask for facts that are far away. (2)
    absent_baselines: baselines that people run and that are not among the rows: "window" for RoPE
        read in a window, "tuned" for RoPE after a short tuning, "hybrid". (3)
    num_sizes: number of sizes of the model. (5)
    bytes_per_parameter: bytes of training text for each parameter; None without a text. (6)
    bits_saved_by_far_context: the most bits per byte that any row saves on far bytes by context
        from beyond the training length; None if not measured. (7)
    has_far: far bytes were measured.
    has_old_t5: its t5 is today's t5:unscaled=true.
    documents_apart: attention did not cross documents, as in a text of tokens.
    table: the table of another program from which the losses are; None for trials of compare.
    """

    num_seeds: int
    has_text: bool
    num_tasks: int
    num_parameters: float | None
    num_steps: int | None
    saved_bits: tuple[float, float] | None
    doubling_is_measured: bool
    turnable_bits: float | None
    taken_encoding: str
    moves_of_leads: Mapping[str, float]
    first_seed_chose: bool
    rates_searched: bool
    knobs_searched: bool
    has_retrieval: bool
    absent_baselines: tuple[str, ...]
    num_sizes: int
    bytes_per_parameter: float | None
    bits_saved_by_far_context: float | None
    has_far: bool
    has_old_t5: bool
    documents_apart: bool
    table: GivenTable | None


def limits_of(study: Study) -> StudyLimits:
    """Return the limits of a study with at least one finished trial."""
    trials = [result.config for result in study.finished]
    text_results = [result for result in study.finished if result.config.is_on_text]
    doubling_is_measured = is_doubling_measured(study)
    saved_by_encoding = (
        bits_saved_by_doubling(study) if doubling_is_measured else falls_since_half(text_results)
    )
    saved = saved_by_encoding.values()
    taken_encoding = ""
    moves: dict[str, float] = {}
    if text_results:
        judgement = judge(study)
        taken_encoding = judgement.places.encoding_of.get(judgement.taken or "", "")
        moves = moves_of_leads(judgement, saved_by_encoding)
    searches_on_text = [rate_check for rate_check in study.rates if rate_check.task == TEXT]
    return StudyLimits(
        num_seeds=_fewest_usual_seeds(trials),
        has_text=bool(text_results),
        num_tasks=len(study.sequence_tasks),
        num_parameters=fmean(result.parameters for result in study.finished) or None,
        num_steps=_shared_steps(trials),
        saved_bits=(min(saved), max(saved)) if saved else None,
        doubling_is_measured=doubling_is_measured,
        turnable_bits=bits_that_may_turn(study),
        taken_encoding=taken_encoding,
        moves_of_leads=moves,
        first_seed_chose=_first_seed_chose(searches_on_text, trials),
        rates_searched=bool(searches_on_text),
        knobs_searched=any(rate_check.plain_at is not None for rate_check in searches_on_text),
        has_retrieval=bool(study.sequence_tasks),
        absent_baselines=_absent_baselines([(row.encoding, row.reading) for row in rows_of(study)]),
        num_sizes=_num_sizes(study, trials),
        bytes_per_parameter=_bytes_per_parameter(text_results),
        bits_saved_by_far_context=_most_bits_saved(study),
        has_far=near_and_far(study).far is not None,
        documents_apart=any(trial.document_end is not None for trial in trials),
        has_old_t5=study.table is None and _has_old_t5(trials),
        table=study.table,
    )


def _shared_steps(trials: Sequence[TrialConfig]) -> int | None:
    """Return the steps of all trials; None if they differ or are unknown, which is written 0."""
    step_counts = {trial.steps for trial in trials}
    return step_counts.pop() or None if len(step_counts) == 1 else None


def _first_seed_chose(searches: Sequence[RateCheck], trials: Sequence[TrialConfig]) -> bool:
    """Return True if trials of a search of rates and settings had as many steps as the study's: its
    trials with the first seed are then those that were chosen."""
    num_steps = trials[0].steps
    return any(
        search.plain_at is not None and search.steps_tried(num_steps) == num_steps
        for search in searches
    )


def _num_sizes(study: Study, trials: Sequence[TrialConfig]) -> int:
    """Return the number of sizes of the model, which a table counts itself."""
    if study.table is not None:
        return study.table.num_sizes
    return len({(trial.width, trial.layers) for trial in trials})


def _has_old_t5(trials: Sequence[TrialConfig]) -> bool:
    """Return True if `t5` was trained when it meant what is `t5:unscaled=true` now."""
    return any(
        trial.encoding == "t5" and trial.recipe <= LAST_RECIPE_OF_UNSCALED_T5 for trial in trials
    )


def _bytes_per_parameter(text_results: Sequence[TrialResult]) -> float | None:
    """Return the bytes of training text for each parameter, the mean over trials; None if no trial
    says how many parameters its model has."""
    ratios = []
    for result in text_results:
        if result.parameters and result.config.batch:
            trial = result.config
            num_bytes = trial.steps * trial.batch * trial.train_length
            ratios.append(num_bytes / result.parameters)
    return fmean(ratios) if ratios else None


def _most_bits_saved(study: Study) -> float | None:
    """Return the most bits per byte that any row saves by far context; None if not measured."""
    context_uses = [context_use(rows) for rows in rows_by_name(study).values()]
    saved_bits = [use.saved.value for use in context_uses if use is not None]
    return max(saved_bits, default=None)


def _absent_baselines(encodings_and_readings: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return which baselines are not among the rows (encoding, reading)."""
    names_and_readings = {
        (plain_name(encoding), reading) for encoding, reading in encodings_and_readings
    }
    absent_baselines = [
        reading for reading in ("window", "tuned") if (ROPE, reading) not in names_and_readings
    ]
    if not any(encoding in HYBRIDS or "/" in encoding for encoding, _ in names_and_readings):
        absent_baselines.append("hybrid")
    return tuple(absent_baselines)


def _fewest_usual_seeds(trials: Sequence[TrialConfig]) -> int:
    """Return how many seeds an encoding usually has (the median over the encodings), for the task
    that has the fewest."""
    seed_counts_by_task: dict[str, Counter[str]] = {}
    for trial in trials:
        seed_counts_by_task.setdefault(trial.task, Counter())[trial.encoding] += 1
    return min(median_high(seed_counts.values()) for seed_counts in seed_counts_by_task.values())


def limit_sentences(limits: StudyLimits) -> Iterator[str]:
    """Yield the sentences of the second line: the size of the study, and what of the seven points
    that must hold for a larger model was not tested."""
    yield f"{_size_of_study(limits)}: {_clause_on_longer_training(limits)}."
    if limits.table is not None:
        yield sentence_on_missing_columns(limits.table)
    if limits.has_text:
        yield f"Not tested: {join_names(_untested_in_words(limits))}."
        if limits.has_far:
            yield "Near and far losses are of different bytes."
        yield _sentence_on_far_context(limits)
    if limits.has_old_t5:
        yield "Its t5 is today's t5:unscaled=true."


def _size_of_study(limits: StudyLimits) -> str:
    """Write seeds, texts, tasks, sizes and steps of a study."""
    seeds_word = number_word(limits.num_seeds).capitalize()
    parts = [f"{seeds_word} {'seed' if limits.num_seeds == 1 else 'seeds'}"]
    if limits.first_seed_chose:
        parts[0] += " (settings were chosen with the first)"
    parts += ["one text"] if limits.has_text else []
    if limits.num_tasks:
        tasks_noun = "task" if limits.num_tasks == 1 else "tasks"
        parts.append(f"{number_word(limits.num_tasks)} {tasks_noun}")
    num_parameters = limits.num_parameters
    if num_parameters is not None:
        parts.append(
            f"{num_parameters / 1e6:.1f} M parameters"
            if num_parameters >= 5e4
            else f"{num_parameters:,.0f} parameters"
        )
    if limits.bytes_per_parameter is not None:
        parts.append(f"{limits.bytes_per_parameter:.2g} bytes a parameter")
    if limits.num_steps is not None:
        parts.append(f"{limits.num_steps:,} steps")
    return ", ".join(parts)


def _clause_on_longer_training(limits: StudyLimits) -> str:
    """Write how much the loss still falls, and which differences could turn by then."""
    if limits.saved_bits is None:
        return "what longer training changes was not measured"
    least, most = (f"{bits:.2f}" for bits in limits.saved_bits)
    fall = f"{least} bits" if least == most else f"{least} to {most} bits"
    if limits.doubling_is_measured:
        fall_clause = f"the last doubling of the steps saved {fall}"
    elif limits.num_steps is None:
        fall_clause = f"in the last half of its steps each loss fell by {fall}"
    else:
        half = limits.num_steps // 2
        fall_clause = f"from step {half:,} to {limits.num_steps:,} losses fell by {fall}"
    unknown_clause = "what a full training does is not known"
    moved_clause = clause_on_moved_leads(limits.taken_encoding, limits.moves_of_leads)
    if moved_clause:
        fall_clause = f"{fall_clause}; {moved_clause}"
    # Leads that fell are what another doubling may turn. Where none did, a general bound is left.
    if any(round(move, 2) < 0 for move in limits.moves_of_leads.values()):
        return f"{fall_clause}, and {unknown_clause}"
    if limits.turnable_bits is None:
        return fall_clause
    turn_clause = f"one more doubling may move leads by {limits.turnable_bits:.2f}"
    return f"{fall_clause}; {turn_clause}, and {unknown_clause}"


def _untested_in_words(limits: StudyLimits) -> list[str]:
    """List what must hold for a larger model and was not tested."""
    baselines_in_words = {
        "window": "RoPE in a window",
        "tuned": "RoPE tuned at length",
        "hybrid": "hybrids with layers without positions",
    }
    parts = []
    if limits.table is not None:
        pass  # how another program chose them is not known, which the sentence on its table says
    elif not limits.rates_searched:
        parts.append("rates, bases, slopes and scales of each encoding (--tune)")
    elif not limits.knobs_searched:
        parts.append("bases, slopes and scales")
    if not limits.has_retrieval:
        parts.append("finding facts far away")
    parts += [baselines_in_words[name] for name in limits.absent_baselines]
    if limits.num_sizes < 2:
        parts.append("another size")
    if limits.table is not None:
        return [*parts, "your hardware and server"]
    if not limits.documents_apart:
        parts.append("documents kept apart")
    return [*parts, "your hardware and server"]


def _sentence_on_far_context(limits: StudyLimits) -> str:
    """Write what context from beyond the training length saves."""
    if limits.bits_saved_by_far_context is None:
        if limits.table is not None:
            return "What far context saves is not in the table."
        if limits.has_far:
            return "What far context saves was not measured in this run."
        return "Far tokens were not measured in this run."
    saved_bits = limits.bits_saved_by_far_context
    if saved_bits < MARGIN:
        rounded_up = math.ceil(1000 * saved_bits) / 1000
        most = f"more than {rounded_up:.3f} bits" if saved_bits > 0 else "anything"
        return (
            f"Far context saves no row {most} on average: far losses show what breaks, not what is "
            "used."
        )
    return f"Far context saves up to {saved_bits:.2f} bits here."


def sentence_on_running_only_near(
    names: Sequence[str], where: str, table: GivenTable | None = None
) -> str:
    """Write which encodings have no number on far bytes. table: where it would stand, if other
    programs than compare measured it."""
    if table is not None:
        return f"The table has no loss of {list_up_to_six(names)} on {where}."
    return f"{list_up_to_six(names)} cannot run on {where}."


def sentence_on_servers(
    encodings: Sequence[str],
    servers_without: Sequence[str],
    best_served: Mapping[str, Gap],
    first_row: str,
    pair_gap: Gap | None = None,
    with_learned_slopes: bool = False,
) -> str:
    """Write which servers have no decoder of encodings, and the best rows that they all run.

    first_row: the first of all rows.
    best_served: differences from the first of all rows, by row: the best served row, then those
        that are tied with it; {} if they all run none.
    pair_gap: the difference of the second of two best served rows from the first.
    with_learned_slopes: whether one of the encodings is ALiBi with learned slopes.
    """
    names = " or ".join(encodings)
    if len(encodings) > 2:
        names = f"any of {list_up_to_six(encodings)}"
    missing = f"No decoder with {names} is known in {join_names(servers_without)}"
    if with_learned_slopes:
        missing += " (those with alibi compute its fixed slopes)"
    if not best_served:
        return f"{missing}."
    served_names = list_up_to_six(best_served)
    gaps_text = _gaps_in_words([*best_served.values()])
    if first_row in best_served and len(best_served) == 1:
        verdict = "is best, and first of all"
    elif len(best_served) == 1:
        verdict = f"is best ({gaps_text} behind {first_row})"
    else:
        between = f"{with_interval(pair_gap)}; " if pair_gap is not None else ""
        verdict = f"do not differ significantly ({between}{gaps_text} behind {first_row})"
    return f"{missing}; of the rows that they run, {served_names} {verdict}."


def _gaps_in_words(gaps: Sequence[Gap]) -> str:
    """Write up to three differences, and of more the lowest and the highest: `+0.30 and
    +0.31 ± 0.06`. Half an interval that is the same for all is written once, at the end."""
    texts = [with_interval(gap) for gap in gaps]
    if len(texts) > 3:
        ordered_gaps = sorted(gaps, key=lambda gap: gap.value)
        texts = [with_interval(ordered_gaps[0]), with_interval(ordered_gaps[-1])]
    half_width_texts = {text.partition(" ± ")[2] for text in texts}
    if len(half_width_texts) == 1:
        texts[:-1] = [text.partition(" ± ")[0] for text in texts[:-1]]
    return " to ".join(texts) if len(gaps) > 3 else join_names(texts)


def clause_on_moved_leads(chosen: str, moves: Mapping[str, float]) -> str:
    """Write how the leads of the row to take moved with the last doubling of the steps; "" if none
    moved by as much as is printed. moves: bits per byte by the row behind, positive if a lead grew.

    >>> clause_on_moved_leads("t5", {"alibi": -0.03, "rope": 0.08})
    "t5's leads fell in it by 0.03 over alibi, and grew by 0.08 over rope"
    """
    fallen = [f"{-move:.2f} over {name}" for name, move in moves.items() if round(move, 2) < 0]
    grown = [f"{move:.2f} over {name}" for name, move in moves.items() if round(move, 2) > 0]
    clauses = []
    if fallen:
        clauses.append(f"fell in it by {join_names(fallen)}")
    if grown:
        in_it = "" if fallen else "in it "
        clauses.append(f"grew {in_it}by {join_names(grown)}")
    if not clauses:
        return ""
    leads_noun = "lead" if len(fallen) + len(grown) == 1 else "leads"
    return f"{chosen}'s {leads_noun} {', and '.join(clauses)}"


def sentence_on_missing_rank(name: str, task: str, seed: int) -> str:
    """Write which trial an encoding lacks for a rank over all tasks."""
    return f"Not ranked: {name} ({task} seed {seed} is missing)."


def sentence_on_missing_columns(table: GivenTable) -> str:
    """Return what a table of losses does not have.

    >>> table = GivenTable("a.csv", "bits per byte", ("size", "steps", "seconds"))
    >>> sentence_on_missing_columns(table)[:42]
    'Not in the table: losses by position, how '
    """
    missing = [words for column, words in _MEANING_OF_COLUMN.items() if column not in table.columns]
    return f"Not in the table: {join_names([*missing, *_NEVER_IN_A_TABLE])}."
