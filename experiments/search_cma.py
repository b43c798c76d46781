"""The search's own evolution against CMA-ES on the same budget: search_cma.py MODEL TEXT [TRIES].

Needs `pip install cma`. Both read the same windows and have their finalists compared on the same
held-out ones; CMA-ES starts from the best of the same seeds, which count as tries."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import cma
import numpy as np

from posenc.extend.measure.losses import Reader
from posenc.extend.measure.samples import halves, sample_windows
from posenc.extend.search.evolution import FINALISTS, Search
from posenc.extend.search.genome import Genome, monotone
from posenc.extend.variants.candidates import SEARCH_WINDOWS
from posenc.hf.loading import load_checkpoint
from posenc.hf.text import split_documents, text_encoder

TARGET, SEEDS, SIGMA, GIVEN_UP = 1024, (1, 2, 3), 0.25, 50.0


def with_cma(search: Search, tries: int, seed: int) -> tuple[float, float]:
    """Score and held-out score of what CMA-ES finds."""
    tried = [search.probe.score(genome) for genome in search._seeds()]
    best = min(tried, key=lambda t: t.score).genome
    start = np.log([*best.factors, best.temperature])
    options = {"seed": seed, "popsize": 8, "verbose": -9}
    evolution = cma.CMAEvolutionStrategy(start, SIGMA, options)
    while len(tried) < tries:
        asked = evolution.ask()
        answers = []
        for logs in asked:
            *factors, temperature = np.exp(logs)
            found = search.probe.score(Genome(monotone(factors), float(temperature)))
            tried.append(found)
            answers.append(min(found.score, GIVEN_UP))
        evolution.tell(asked, answers)
    finalists = sorted(tried[:tries], key=lambda t: t.score)[:FINALISTS]
    checked = [(t.score, search.check.score(t.genome).score) for t in finalists]
    return min(checked, key=sum)


def main(model: Path, text: Path, tries: int) -> None:
    checkpoint = load_checkpoint(model)
    encode = text_encoder(model, checkpoint.config.vocab_size)
    to_fit, _ = halves(split_documents(text.read_text(encoding="utf-8")), TARGET)
    windows = sample_windows(encode, to_fit, TARGET, SEARCH_WINDOWS)
    search = Search(
        Reader(checkpoint.model), checkpoint.rotary, windows, checkpoint.trained_length, None
    )
    own = search.evolve(tries, lambda what, share: None)
    print(f"evolution, {own.tried} tries: {own.score:.4f}, held out {own.held_out:.4f}", flush=True)
    for seed in SEEDS:
        score, held = with_cma(search, tries, seed)
        if not math.isfinite(score + held):
            raise ValueError("no finite score")
        print(f"cma, seed {seed}, {tries} tries: {score:.4f}, held out {held:.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 64)
