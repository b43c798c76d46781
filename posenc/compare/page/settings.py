"""How the trials of a study were set and tuned, and what a reader needs to repeat them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

from posenc.compare.judging.tuning import pairs_turned_by_rates, pairs_turned_by_tuning
from posenc.compare.judging.units import units_of
from posenc.compare.results import (
    RATE_FACTORS,
    RateCheck,
    RateTried,
    Study,
    TrialResult,
)
from posenc.compare.rows import plain_name
from posenc.compare.trial.config import COSINE, WARMUP, TrialConfig
from posenc.compare.trial.run_trial import window_of_rotated_layers
from posenc.report.report import (
    Block,
    Heading,
    Links,
    Number,
    Section,
    Table,
    Value,
    join_names,
)
from posenc.tasks.registry import TASKS, TEXT

_PAPER_PATTERN = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_EPRINT_PATTERN = re.compile(r"eprint = \{(.+?)\}")
_OMITTED_KEYS = {"name", "class", "source", "parameters shared by", "num_heads", "head_dim"}
"""Keys of a spec that are left out: names in the code, and sizes of the model."""
_HOW_TUNED = (
    "Each encoding had the same first trials, with one seed: rates, settings of its own knob, then "
    "the best of both together. More followed where an edge won, so their numbers differ. They "
    "were judged on validation data of the training length; longer lengths were not measured, so "
    "they had no influence. Seed 0 of the study, with the same steps, is the trial that was "
    "chosen; only the other seeds are independent of the choice."
)
_HOW_RATES_WERE_TRIED = (
    "Each rate was tried with one seed. Bits per byte or target are on validation data of the "
    "training length; longer lengths were not measured in these trials, so they had no influence "
    "on the choice. If the chosen rate is the lowest or the highest tried, a better one may lie "
    "beyond."
)


def tuning_sections(study: Study) -> Iterator[Section]:
    """Yield the sections of a study whose learning rates, or also settings, were chosen."""
    if any(check.plain_at is not None for check in study.rates):
        yield Section("Choice of rates and settings", [*_tuning_blocks(study)])
        yield Section("", [_HOW_TUNED], is_detail=True)
    else:
        yield Section("Learning rates", [_rate_table(study.rates)])
        yield Section("", [units_of(study).write(_HOW_RATES_WERE_TRIED)], is_detail=True)


def _tuning_blocks(study: Study) -> Iterator[Block]:
    """Yield what a search of rates and settings chose for each encoding, and which order would be
    another with the usual settings, or with one rate for all. Its words are not "tuned", which
    names a reading of the same page."""
    header = [
        "encoding",
        Heading("trials", "of the search"),
        "setting taken",
        Heading("learning rate", "of the model"),
        Heading("rate of tables", "in multiples of it"),
        Heading("chosen", f"{units_of(study).bits}, validation"),
        Heading("before tuning", _untuned_in_words(study.rates)),
        Heading("one rate", "the usual setting, tables at the model's rate"),
        Heading("edges that won", "beyond which may be better"),
    ]
    rows = [_tuning_row(check) for check in study.rates]
    yield Table(
        header,
        rows,
        "Rates and settings of every encoding are chosen by one rule.",
        as_cards=True,
        name="tuning",
    )
    if study.rates_from:
        yield f"This run did not search: the choices are recorded, from {study.rates_from}."
    untuned = f"Before tuning ({_untuned_in_words(study.rates)})"
    yield _sentence_on_order(untuned, pairs_turned_by_tuning(study.rates))
    if any(check.one_rate_bits is not None for check in study.rates):
        one_rate = "With one rate for all parameters"
        yield _sentence_on_order(one_rate, pairs_turned_by_rates(study.rates))


def _untuned_in_words(checks: Sequence[RateCheck]) -> str:
    """Return in words at which rates encodings are compared where none is tuned: `rate 0.002,
    tables 20 times that, usual setting`, or that they have rates of their own."""
    untuned = [check.tried[check.plain_at] for check in checks if check.plain_at is not None]
    rate_pairs = {(tried.lr, tried.encoding_lr) for tried in untuned}
    if len(rate_pairs) != 1:
        return "their own rates, usual setting"
    lr, factor = rate_pairs.pop()
    return f"rate {lr:g}, tables {factor:g} times that, usual setting"


def _sentence_on_order(untuned: str, turned_pairs: Sequence[tuple[str, str]]) -> str:
    """Write which pairs of the search's trials are in another order where less is tuned.

    untuned: what is left untuned, in words: "Before tuning (rate 0.002, ...)". turned_pairs: pairs
    (a, b) of which `b` is ahead then, and `a` after tuning.
    """
    if not turned_pairs:
        return f"{untuned} no two of the search's trials, one seed each, are in another order."
    pairs_in_words = "; ".join(f"{b} before {a}" for a, b in turned_pairs)
    return f"{untuned} the search's trials, one seed each, are in another order: {pairs_in_words}."


def _tuning_row(check: RateCheck) -> list[Value]:
    """Return the row of an encoding in the table of the search."""
    plain_cell, one_rate_cell = (
        None if bits is None else Number(bits, format_spec=".3f")
        for bits in (check.plain_bits, check.one_rate_bits)
    )
    best = check.best
    if best is None or best.bits is None:
        untrained = [check.encoding, len(check.tried), "none trained", None, None, None]
        return [*untrained, plain_cell, one_rate_cell, None]
    return [
        check.encoding,
        len(check.tried),
        best.encoding or check.encoding,
        f"{best.lr:g}",
        f"{best.encoding_lr:g}" if _has_tables(check) else None,
        Number(best.bits, format_spec=".3f"),
        plain_cell,
        one_rate_cell,
        ", ".join(check.edges) or "none",
    ]


def _has_tables(check: RateCheck) -> bool:
    """Return True if an encoding has tables or scalars with a rate of their own: only then a search
    tries several factors of it."""
    return len({attempt.encoding_lr for attempt in check.tried}) > 1


def _rate_table(checks: Sequence[RateCheck]) -> Table:
    """Return the learning rates that were tried, a row for each task and encoding."""
    factor_headings = [f"x{factor:g}" for factor in RATE_FACTORS]
    rows = []
    for check in checks:
        cells = [_tried_text(tried) for tried in check.tried]
        rows.append([check.encoding, check.task, *cells, _chosen_text(check)])
    caption = "Learning rates, by the loss on validation data like that of training."
    header = ["encoding", "task", *factor_headings, "taken"]
    return Table(header, rows, caption, name="learning-rates")


def _tried_text(tried: RateTried) -> str:
    """Return the learning rate and the validation loss of a trial, such as "0.001: 2.345"; "0.001:
    failed" if it has none. Units: bits per byte or, for a task, per target."""
    loss_text = "failed" if tried.bits is None else f"{tried.bits:.3f}"
    return f"{tried.lr:g}: {loss_text}"


def _chosen_text(check: RateCheck) -> str:
    """Return the chosen rate, and a note if it is the lowest or highest tried."""
    if check.chosen is None:
        return "none trained"
    rates = [tried.lr for tried in check.tried]
    if check.chosen == max(rates):
        return f"{check.chosen:g}, the highest tried"
    if check.chosen == min(rates):
        return f"{check.chosen:g}, the lowest tried"
    return f"{check.chosen:g}"


def specs_table(study: Study) -> Table:
    """Return a row for each encoding, or for each task if its settings depend on the task."""
    cells_by_encoding: dict[str, dict[str, list[Value]]] = {}
    for result in study.finished:
        cells_by_task = cells_by_encoding.setdefault(result.config.encoding, {})
        cells_by_task.setdefault(result.config.task, _setting_cells(result))
    rows = []
    for name, cells_of_tasks in cells_by_encoding.items():
        first_cells, *other_cells = cells_of_tasks.values()
        if all(cells == first_cells for cells in other_cells):
            rows.append([name, *first_cells])
        else:
            rows += [[f"{name} on {task}", *cells] for task, cells in cells_of_tasks.items()]
    header = [
        "encoding",
        Heading("own parameters", "trained"),
        Heading("shared by", "layers or heads"),
        "settings",
        "source",
    ]
    return Table(header, rows, as_cards=True, name="settings")


def _setting_cells(result: TrialResult) -> list[Value]:
    """Return the cells of an encoding's settings: parameters, what shares them, its arguments, its
    source."""
    spec = {k: v for k, v in result.spec.items() if k not in _OMITTED_KEYS and "<" not in v}
    window = window_of_rotated_layers(result)
    if window is not None:
        spec["window_size"] = f"{window} in layers with rotation, counting the query's own"
    settings_text = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in spec.items() if v != "None")
    settings_text += f", learning rate {result.config.lr:g}"
    if result.encoding_parameters:
        settings_text += f", its tables {result.config.encoding_lr:g} times that"
    sharers = result.spec.get("parameters shared by", "")
    return [result.encoding_parameters, sharers, settings_text, result.spec.get("source")]


def paper_links(study: Study) -> Links:
    """Return the addresses of the papers that describe the encodings."""
    sources = {result.config.encoding: result.spec.get("source", "") for result in study.finished}
    addresses = {}
    for encoding, source in sources.items():
        if paper := _PAPER_PATTERN.search(source):
            addresses[f"{encoding}: {paper[0]}"] = f"https://arxiv.org/abs/{paper[1]}"
    return Links(addresses)


def bibliography(study: Study) -> str:
    """Return entries of BibTeX for the papers that describe the encodings of a study, each once. A
    source that is no paper of arXiv, or one that papers.bib lacks, becomes a note."""
    text = resources.files("posenc.compare.page").joinpath("papers.bib").read_text(encoding="utf-8")
    entry_of_paper = {_EPRINT_PATTERN.findall(entry)[0]: entry for entry in text.split("\n\n")}
    entries = {}
    for result in study.finished:
        source = result.spec.get("source", "")
        papers = _PAPER_PATTERN.findall(source)
        known_papers = [paper for paper in papers if paper in entry_of_paper]
        for paper in known_papers:
            entries[paper] = entry_of_paper[paper].strip()
        is_complete = bool(papers) and known_papers == papers
        if source and not is_complete:
            key = re.sub(r"\W+", "-", plain_name(result.config.encoding)).strip("-")
            note = "".join(f"\\{c}" if c in "&%$#_" else c for c in source if c not in "{}\\")
            entries[source] = f"@misc{{{key},\n  note = {{{note}}},\n}}"
    return "\n\n".join(entries.values()) + "\n" if entries else ""


def facts_to_repeat(study: Study) -> Mapping[str, object]:
    """Return what a reader needs to repeat the study, by name."""
    if study.table is not None:
        return {
            "table": study.table.name,
            "losses": study.table.loss_unit,
            "columns": ", ".join(study.table.columns),
            **study.versions,
        }
    codes = dict.fromkeys(f"{t.encoding} {t.code}" for t in study.trials if t.code)
    seeds = sorted({trial.seed for trial in study.trials})
    return {
        **_text_facts(study),
        "model": _model_fact(study.trials[0]),
        **dict(_training_fact(trial, study) for trial in study.trials),
        "seeds": ", ".join(map(str, seeds)),
        "started": study.started,
        **study.versions,
        **study.hardware,
        **({"hash of the code": ", ".join(codes)} if codes else {}),
    }


def _text_facts(study: Study) -> dict[str, str]:
    """Return the facts of the text; {} if there is none."""
    corpus = study.corpus
    if corpus is None:
        return {}
    file_word = "file" if corpus.num_files == 1 else "files"
    return {
        "text": f"{corpus.name}, {corpus.num_files:,} {file_word}, hash {corpus.hash}",
        "split": (
            f"{corpus.split}: {corpus.size_in_words('train')} to train on, "
            f"{corpus.size_in_words('valid')} to validate, {corpus.size_in_words('test')} to test"
        ),
        **_token_facts(study),
    }


def _token_facts(study: Study) -> dict[str, str]:
    """Return the facts of a text of tokens; {} for bytes."""
    trial = study.of_task(TEXT).trials[0]
    if not trial.vocabulary or study.corpus is None:
        return {}
    tokenizer = study.corpus.tokenizer
    of_tokenizer = f" of {tokenizer}, hash {trial.tokenizer}" if tokenizer else ""
    return {
        "tokens": (
            f"{trial.vocabulary:,}{of_tokenizer}; {trial.document_end} ends a document, which "
            "attention does not leave"
        )
    }


def _model_fact(config: TrialConfig) -> str:
    """Return the sizes of the trials' model."""
    return (
        f"decoder, {config.layers} layers, width {config.width}, {config.heads} heads on "
        f"{config.kv_heads} key/value heads, projections {config.projections}, layers "
        f"{config.architecture}"
    )


def train_lengths_in_words(trial: TrialConfig) -> str:
    """Return the lengths of training windows: "128", or "32, 64 and 128"."""
    return join_names(f"{length:,}" for length in trial.lengths_of_steps)


def _size_of_step(trial: TrialConfig, unit: str) -> str:
    """Return what a step trains on: `32 × 128 bytes`, or of several lengths `4,096 bytes in windows
    of 32, 64 or 128, drawn for each step`."""
    if not trial.train_lengths:
        return f"{trial.batch} × {trial.train_length:,} {unit}"
    *shorter, longest = (f"{length:,}" for length in trial.train_lengths)
    return (
        f"{trial.batch * trial.train_length:,} {unit} in windows of {', '.join(shorter)} or "
        f"{longest}, drawn for each step"
    )


def _schedule_note(trial: TrialConfig) -> str:
    """Return the warm-up and schedule of a trial, with a comma before; "" for the usual ones."""
    if (trial.warmup, trial.schedule) == (WARMUP, COSINE) or trial.is_of_table:
        return ""
    return f", warm-up over {trial.warmup_steps:,} steps, then {trial.schedule}"


def _training_fact(trial: TrialConfig, study: Study) -> tuple[str, str]:
    """Return how the trials of this one's task were trained, as the name of a fact and its text."""
    fact_name = "training" if trial.is_on_text else f"training on {trial.task}"
    unit = trial.length_unit if trial.is_on_text else TASKS[trial.task].length_unit
    peaks = sorted({t.lr for t in study.trials if t.task == trial.task})
    rate_text = f"peak learning rate {peaks[0]:g}"
    if len(peaks) > 1:
        rate_text = f"peak learning rates from {peaks[0]:g} to {peaks[-1]:g} as in their table"
    factors = sorted({t.encoding_lr for t in study.trials if t.task == trial.task})
    tables_text = f"tables of encodings {factors[0]:g} times it"
    if len(factors) > 1:
        tables_text = f"tables of encodings {factors[0]:g} to {factors[-1]:g} times it"
    which = " of the longest, or as many tokens," if trial.train_lengths else ""
    notes = f", {trial.micro_batch} windows{which} at a time" if trial.micro_batch else ""
    notes += ", layers computed again in the backward pass" if trial.recompute else ""
    notes += _schedule_note(trial)
    notes += ", compiled" if trial.compile else ""
    return fact_name, (
        f"{trial.steps:,} steps of {_size_of_step(trial, unit)}, {rate_text}, {tables_text}, "
        f"{trial.precision} on {trial.device}{notes}"
    )
