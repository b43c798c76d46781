"""Break the library in forty ways and ask its tests to see it: python -m tests.power [OUT.json].

Each mutation replaces one piece of text in a copy of the repository and runs the tests of the
folders named beside it, without those that `make test` leaves out. A mutation is seen if a test
fails that passes without it. Run it before a change of the tests and after: what was seen must be
seen again. A mutation whose text is no longer in the code must be written anew, never dropped: the
run fails.

With a file from an earlier run as OUT.json, finished mutations are not run again.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = (
    *("posenc", "tests", "docs", "results", "experiments", "benchmarks", "explorer"),
    *("pyproject.toml", "hatch_build.py", "Makefile"),
)
LEFT_OUT = "not slow and not prose and not nightly"
SECONDS = 1200
"""Longest run of one mutation's tests."""


class Mutation(NamedTuple):
    """Replace `right` by `wrong` in a file of posenc/; `tests` (under tests/) must see it."""

    file: str
    right: str
    wrong: str
    tests: str


MUTATIONS = (
    # Scores
    Mutation(
        "encodings/scores/alibi.py",
        "return bias.masked_fill(side * signed_distance < 0, -torch.inf)",
        "return bias",
        "encodings/scores",
    ),
    Mutation(
        "encodings/numerics/slopes_and_buckets.py",
        "2 ** (-bias_max * h / largest_power_of_two) for h in range(1, largest_power_of_two + 1)",
        "2 ** (-bias_max * h / largest_power_of_two) for h in range(largest_power_of_two)",
        "encodings/scores",
    ),
    Mutation(
        "encodings/numerics/slopes_and_buckets.py",
        "edges = list(range(1, num_exact + 1))",
        "edges = list(range(0, num_exact))",
        "encodings/scores",
    ),
    Mutation(
        "encodings/scores/t5.py",
        "bucketed_distance = distance.abs() if self.bidirectional else distance.clamp(min=0)",
        "bucketed_distance = distance.abs()",
        "encodings/scores",
    ),
    Mutation(
        "encodings/scores/kerple.py",
        "return -r1 * (r2 * distance).log1p()",
        "return -r1 * r2 * distance.log1p()",
        "encodings/scores",
    ),
    Mutation(
        "encodings/scores/cope.py",
        "return open_gates.flip(-1).cumsum(-1).flip(-1)",
        "return open_gates.cumsum(-1)",
        "encodings/scores",
    ),
    Mutation(
        "encodings/scores/fox.py",
        "return state if past is None else past[:, :, -1:] + state",
        "return state",
        "encodings/scores",
    ),
    # Queries and keys
    Mutation(
        "frequencies/series.py",
        "return geometric_series(dim // 2, base, Decimal(2) / dim)",
        "return geometric_series(dim // 2, base, Decimal(2) / (dim + 1))",
        "encodings/queries_keys",
    ),
    Mutation(
        "encodings/queries_keys/rotate.py",
        "out[..., :num_pairs].addcmul_(x[..., num_pairs:], sin, value=-1)",
        "out[..., :num_pairs].addcmul_(x[..., num_pairs:], sin)",
        "encodings/queries_keys",
    ),
    Mutation(
        "encodings/queries_keys/rotate.py",
        "gradients = _OnePassRotation.apply(ctx.interleaved, cos, -sin, *grads)",
        "gradients = _OnePassRotation.apply(ctx.interleaved, cos, sin, *grads)",
        "encodings/queries_keys",
    ),
    Mutation(
        "frequencies/float64_formulas.py",
        "return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0",
        "return 0.1 * mscale * math.log(factor) if factor > 1 else 1.0",
        "encodings/queries_keys",
    ),
    Mutation(
        "frequencies/scalings/yarn.py",
        "low = Decimal(math.floor(low))",
        "low = Decimal(math.ceil(low))",
        "encodings/queries_keys",
    ),
    Mutation(
        "frequencies/scalings/ntk.py",
        "factor ** (Decimal(rotary_dim) / (rotary_dim - 2))",
        "factor",
        "encodings/queries_keys",
    ),
    Mutation(
        "encodings/queries_keys/xpos.py",
        "return self._rotate_and_fade(q, 1), self._rotate_and_fade(k, -1)",
        "return self._rotate_and_fade(q, 1), self._rotate_and_fade(k, 1)",
        "encodings/queries_keys",
    ),
    # Attention, masks, positions
    Mutation(
        "masks/kinds.py",
        "return (pairs.q_position - pairs.kv_position).abs() < window_size",
        "return (pairs.q_position - pairs.kv_position).abs() <= window_size",
        "test_masks.py",
    ),
    Mutation(
        "masks/kinds.py",
        "return pairs.q_position >= pairs.kv_position",
        "return pairs.q_position > pairs.kv_position",
        "attend",
    ),
    Mutation(
        "masks/kinds.py",
        "return q_document == kv_document",
        "return torch.ones_like(q_document == kv_document)",
        "test_masks.py attend",
    ),
    Mutation(
        "positions/tokens.py",
        "positions = valid.long().cumsum(-1) + (start - 1)",
        "positions = valid.long().cumsum(-1) + start",
        "test_positions.py test_masks.py",
    ),
    Mutation(
        "attend/cache.py",
        'return self._buffers["v"][:, :, : self.length]',
        'return self._buffers["k"][:, :, : self.length]',
        "attend models",
    ),
    Mutation(
        "attend/ways/reference.py",
        "weights = F.dropout(weights, problem.dropout_p)",
        "pass",
        "attend",
    ),
    Mutation(
        "encodings/embeddings/sinusoidal.py",
        "rows = torch.stack([sin, cos], dim=-1).flatten(-2)",
        "rows = torch.stack([cos, sin], dim=-1).flatten(-2)",
        "encodings/embeddings",
    ),
    # Models and layers
    Mutation(
        "models/generating.py",
        "positions = self.valid.sum(1, keepdim=True)",
        "positions = self.valid.sum(1, keepdim=True) - 1",
        "models",
    ),
    Mutation(
        "models/generating.py",
        "is_hidden = probabilities.cumsum(-1) - probabilities >= top_p",
        "is_hidden = probabilities.cumsum(-1) >= top_p",
        "models",
    ),
    Mutation(
        "nn/torch_layers.py",
        "hidden = mask == -torch.inf",
        "hidden = mask == torch.inf",
        "nn",
    ),
    # Compare
    Mutation(
        "compare/trial/train.py",
        "return config.lr * (step + 1) / warmup_steps",
        "return config.lr * step / warmup_steps",
        "compare/trial",
    ),
    Mutation(
        "compare/trial/train.py",
        'group["lr"] = rate * group["factor"]',
        'group["lr"] = rate',
        "compare/trial",
    ),
    Mutation(
        "compare/trial/evaluate.py",
        "return nats / math.log(2)",
        "return nats",
        "compare/trial",
    ),
    Mutation(
        "compare/trial/windows.py",
        "starts = generator.integers(0, len(symbols) - config.train_length, size=config.batch)",
        "starts = generator.integers(0, len(symbols) - config.train_length - 9, size=config.batch)",
        "compare/trial",
    ),
    Mutation(
        "compare/judging/standing.py",
        "return sum(key < own_key for key in all_keys) + (num_equal + 1) / 2",
        "return sum(key < own_key for key in all_keys) + 1",
        "compare/judging",
    ),
    Mutation(
        "statistics/seed_intervals.py",
        "half_widths = quantile * np.sqrt(np.maximum(variances, least_variance) * factors / 2)",
        "half_widths = quantile * np.sqrt(np.maximum(variances, least_variance) * factors)",
        "statistics",
    ),
    Mutation(
        "statistics/text_intervals.py",
        "np.quantile(largest_ratios, 0.95) * differences.std(1, ddof=1) / np.sqrt(num_windows)",
        "np.quantile(largest_ratios, 0.95) * differences.std(1, ddof=0) / num_windows",
        "statistics",
    ),
    Mutation(
        "tasks/recall.py",
        "targets[2 * num_pairs + num_fillers + 2 :: 2] = values[order_of_questions]",
        "targets[2 * num_pairs + num_fillers + 2 :: 2] = values",
        "tasks",
    ),
    Mutation(
        "tasks/scoring.py",
        "return float((is_right | ~is_scored).all(1).mean()), float(is_right[is_scored].mean())",
        "return float((is_right & is_scored).all(1).mean()), float(is_right[is_scored].mean())",
        "tasks",
    ),
    # Extend, attach, checkpoints
    Mutation(
        "extend/measure/losses.py",
        "targets = tokens[:, start + 1 : start + piece_len + 1]",
        "targets = tokens[:, start : start + piece_len]",
        "extend",
    ),
    Mutation(
        "statistics/text_intervals.py",
        "loss_sums[drawn_documents].sum(1) / token_counts[drawn_documents].sum(1), [2.5, 97.5]",
        "loss_sums[drawn_documents].sum(1) / token_counts[drawn_documents].sum(1), [5, 95]",
        "statistics",
    ),
    Mutation(
        "hf/learned_tables.py",
        "after = length + table.num_counted_rows",
        "after = length",
        "hf",
    ),
    # Runtimes and the doctor
    Mutation(
        "frequencies/float64_formulas.py",
        "return theta * factor ** (dim / (dim - 2))",
        "return theta * factor",
        "runtimes doctor",
    ),
    Mutation(
        "frequencies/float64_formulas.py",
        "if wavelength > original_length / low_freq_factor:",
        "if wavelength > original_length / high_freq_factor:",
        "runtimes doctor",
    ),
    Mutation(
        "runtimes/writers/weight_rows.py",
        "return [i for t in range(half) for i in (t, t + half)]",
        "return [*range(0, num_rotary, 2), *range(1, num_rotary, 2)]",
        "runtimes doctor",
    ),
    Mutation(
        "runtimes/writers/fold_temperature.py",
        "return scale_rows(query_rows_to_scale(folder, model), model, multiplier**2)",
        "return scale_rows(query_rows_to_scale(folder, model), model, multiplier)",
        "runtimes doctor",
    ),
)


def copied(folder: Path) -> None:
    """Copy what the tests read into `folder`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "node_modules")
            shutil.copytree(source, folder / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy(source, folder / name)
    for path in ROOT.glob("*.md"):
        shutil.copy(path, folder / path.name)


def collect(folder: Path) -> None:
    """Raise RuntimeError where a file of tests lacks something in `folder`, which would pass for a
    mutation that is seen."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:])


def seen_by(mutation: Mutation, folder: Path) -> str:
    """Return the first test that fails with the mutation in place; empty if none does."""
    path = folder / "posenc" / mutation.file
    source = path.read_text(encoding="utf-8")
    if mutation.right not in source:
        raise ValueError(f"{mutation.file} no longer has {mutation.right!r}: write it anew")
    path.write_text(source.replace(mutation.right, mutation.wrong, 1), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", LEFT_OUT]
    folders = [f"tests/{name}" for name in mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *folders],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    finally:
        path.write_text(source, encoding="utf-8")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        raise RuntimeError(f"{mutation.file}: pytest ended with {done.returncode}\n{done.stdout}")
    if not failed:
        return ""
    # A test that the copy of the repository breaks has seen nothing.
    test = failed[0].partition(" ")[2].partition(" - ")[0]
    done = subprocess.run(
        [*command, test], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{test} fails without a mutation, too\n{done.stdout[-4000:]}")
    return failed[0]


def names() -> Iterator[tuple[str, Mutation]]:
    """Name each mutation by its file and what it replaces."""
    for mutation in MUTATIONS:
        yield f"{mutation.file}: {mutation.right} -> {mutation.wrong}", mutation


def main(out: Path | None) -> int:
    """Run what has not run yet and print a line for each; return the exit code."""
    known = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        collect(folder)
        for label, mutation in names():
            if label not in known:
                known[label] = seen_by(mutation, folder)
                if out:
                    out.write_text(json.dumps(known, indent=1), encoding="utf-8")
            print("seen  " if known[label] else "UNSEEN", label, flush=True)
    count = sum(bool(known[label]) for label, _ in names())
    print(f"{count} of {len(MUTATIONS)} mutations are seen")
    return count < len(MUTATIONS)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
