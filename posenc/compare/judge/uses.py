"""Which encoding for what: one line for each use, from studies of texts and of tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from posenc.compare.judge.answer import why_unsure
from posenc.compare.judge.standing import Standing, standing_of_tasks, standings
from posenc.compare.results import Study
from posenc.sentence import listed, phrase
from posenc.tasks.known import TEXT


def which_for_what(studies: Mapping[str, Study]) -> str:
    """Say which encoding to use for short context, for long context and for tasks, in at most 40
    words for two texts and one study of tasks.

    On texts of one recipe it is one that no other beats significantly on any, or else the best one
    of each; so it is over the tasks of studies that have several. "Perhaps" where no difference has
    an interval.
    """
    texts = {name: text for name, each in studies.items() if (text := each.of_task(TEXT)).finished}
    found = {name: each for name, text in texts.items() if (each := standings(text))}
    own = {"encoding": "", "seed": 0, "source": ""}
    trials = {(each.trials[0], bool(each.rates)) for each in texts.values()}
    recipes = {replace(t, lr=0.0 if chosen else t.lr, **own) for t, chosen in trials}
    alike = len(recipes) == len(texts) and len({replace(t, corpus="") for t in recipes}) == 1
    said = []
    for use, at in (("Short context", 0), ("Long context", -1)) if found else ():
        places = {name: each[at] for name, each in found.items()}
        bits = partial(_bits, alone=len(places) == 1)
        said.append(_use(use, _best(places, alike, bits), [*places.values()]))
    if over := {n: each for n, study in studies.items() if (each := standing_of_tasks(study))}:
        said.append(_use("Copying and recall", _best(over, True, _ranks), [*over.values()]))
    return phrase(" ").join(said)


def _use(use: str, names: str, places: Sequence[Standing]) -> str:
    """Write a line: which encodings to use for what, with "perhaps" if a place has no intervals."""
    sure = not any(map(why_unsure, places))
    said = "{use}: {names}." if sure else "{use}: perhaps {names}."
    return phrase(said, use=phrase(use), names=names)


def _best(
    places: Mapping[str, Standing], alike: bool, numbers: Callable[[Mapping, str], str]
) -> str:
    """Name the best encoding of all studies, or the best of each, with its number unless tied."""
    tied = set.intersection(*(set(each.first) for each in places.values()))
    if alike and tied:
        best = min(tied, key=lambda name: fmean(each.mean(name) for each in places.values()))
        return _named(best, numbers(places, best), len(tied))
    said = {n: phrase(n) if p.first[1:] else numbers({n: p}, p.order[0]) for n, p in places.items()}
    return listed([_named(p.order[0], said[name], len(p.first)) for name, p in places.items()])


def _bits(places: Mapping[str, Standing], name: str, alone: bool = False) -> str:
    """Write the losses of an encoding with their texts; without it if there is only one."""
    one = "{bits:.2f} bits" if alone else "{bits:.2f} bits on {text}"
    said = [
        phrase("{bits:.2f} on {text}" if i else one, bits=p.mean(name), text=phrase(text))
        for i, (text, p) in enumerate(places.items())
    ]
    return phrase(", ").join(said)


def _ranks(places: Mapping[str, Standing], name: str) -> str:
    """Write the mean ranks of an encoding with the number of tasks."""
    one = "mean rank {rank:.2f} over {where}"
    tied = "tied mean rank {rank:.2f} over {where}" if len(places) > 1 else one
    at = places.values()
    said = [phrase(tied if p.first[1:] else one, rank=p.mean(name), where=p.where) for p in at]
    return phrase(", ").join(said)


def _named(best: str, numbers: str, num_tied: int = 1) -> str:
    """Write an encoding with its numbers in brackets, and how many are tied with it: "rope (2.31
    bits; 1 tied)"."""
    if num_tied > 1:
        numbers = phrase("{numbers}; {number} tied", numbers=numbers, number=num_tied - 1)
    return phrase("{what} ({numbers})", what=best, numbers=numbers)
