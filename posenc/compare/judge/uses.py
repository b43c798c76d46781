"""Which encoding for what: one line for each use, from studies of texts and of tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from posenc.compare.judge.answer import why_unsure
from posenc.compare.judge.standing import Standing, standing_of_tasks, standings
from posenc.compare.results import Study
from posenc.sentence import join_names
from posenc.tasks.known import TEXT


def which_for_what(studies: Mapping[str, Study]) -> str:
    """Return in words which encoding to use for short context, for long context and for tasks: at
    most 40 words for two texts and one study of tasks.

    studies: by the name of their text.

    On texts of one recipe it is one that no other beats significantly on any, or else the best one
    of each text; the same holds for studies with several tasks. The line says "perhaps" where no
    difference has an interval.
    """
    texts = {name: text for name, each in studies.items() if (text := each.of_task(TEXT)).finished}
    by_text = {name: each for name, text in texts.items() if (each := standings(text))}
    own = {"encoding": "", "seed": 0, "source": ""}
    trials = {(each.trials[0], bool(each.rates)) for each in texts.values()}
    recipes = {replace(t, lr=0.0 if chosen else t.lr, **own) for t, chosen in trials}
    is_one_recipe = (
        len(recipes) == len(texts) and len({replace(t, corpus="") for t in recipes}) == 1
    )
    lines = []
    # The first standing of a text is at the training length, the last at the longest.
    for use, at in (("Short context", 0), ("Long context", -1)) if by_text else ():
        places = {name: at_lengths[at] for name, at_lengths in by_text.items()}
        bits = partial(_losses_with_texts, alone=len(places) == 1)
        lines.append(
            _line_for_use(use, _best_encodings(places, is_one_recipe, bits), [*places.values()])
        )
    if over := {n: each for n, study in studies.items() if (each := standing_of_tasks(study))}:
        lines.append(
            _line_for_use(
                "Copying and recall",
                _best_encodings(over, True, _ranks_with_task_counts),
                [*over.values()],
            )
        )
    return " ".join(lines)


def _line_for_use(use: str, names: str, places: Sequence[Standing]) -> str:
    """Return the line of a use: which encodings to use for it, with "perhaps" if a standing has no
    intervals."""
    sure = not any(map(why_unsure, places))
    return f"{use}: {names}." if sure else f"{use}: perhaps {names}."


def _best_encodings(
    places: Mapping[str, Standing], is_one_recipe: bool, numbers: Callable[[Mapping, str], str]
) -> str:
    """Return in words the best encoding of all studies or, if none is, the best of each.

    places: standings by the name of their text.
    is_one_recipe: True if the studies differ in the text only; otherwise each has its best.
    numbers: writes the numbers of an encoding in these standings.
    """
    tied = set.intersection(*(set(each.first) for each in places.values()))
    if is_one_recipe and tied:
        best = min(tied, key=lambda name: fmean(each.mean(name) for each in places.values()))
        return _with_numbers(best, numbers(places, best), len(tied))
    # The numbers of the best of each study; only the name of the text where others are tied with
    # it.
    texts = {n: n if p.first[1:] else numbers({n: p}, p.order[0]) for n, p in places.items()}
    return join_names(
        [_with_numbers(p.order[0], texts[name], len(p.first)) for name, p in places.items()]
    )


def _losses_with_texts(places: Mapping[str, Standing], name: str, alone: bool = False) -> str:
    """Return the losses of an encoding in words, each with its text; without the text if `alone`:
    `2.31 bits on code, 2.40 on novel`."""
    losses = []
    for i, (text, standing) in enumerate(places.items()):
        unit = "" if i else " bits"  # once, after the first number
        where = "" if alone else f" on {text}"
        losses.append(f"{standing.mean(name):.2f}{unit}{where}")
    return ", ".join(losses)


def _ranks_with_task_counts(places: Mapping[str, Standing], name: str) -> str:
    """Return the mean ranks of an encoding in words, each with its number of tasks."""
    ranks = []
    for standing in places.values():
        is_tied = len(places) > 1 and len(standing.first) > 1
        tied = "tied " if is_tied else ""
        ranks.append(f"{tied}mean rank {standing.mean(name):.2f} over {standing.where}")
    return ", ".join(ranks)


def _with_numbers(best: str, numbers: str, num_tied: int = 1) -> str:
    """Return an encoding with its numbers in brackets, and how many are tied with it: `rope (2.31
    bits; 1 tied)`. num_tied counts it, too."""
    if num_tied > 1:
        numbers = f"{numbers}; {num_tied - 1} tied"
    return f"{best} ({numbers})"
