"""Tables of losses for posenc judge: a study as another trainer would have written it."""

import csv
from pathlib import Path

from posenc.compare.results import Study


def records_of(study: Study, curves: bool = True) -> list[dict[str, object]]:
    """Return the losses of a study's text, a dict for each: by length and reading, by position in
    the longest windows, and in training."""
    records = []
    for result in study.results:
        config = result.config
        trial = {"encoding": config.encoding, "seed": config.seed, "steps": config.steps}
        if result.timing is not None:
            trial["seconds"] = result.timing.train_seconds
        if result.parameters:
            trial["size"] = result.parameters
        if result.reason is not None:
            failed = {"length": config.train_length, "bits_per_byte": float("nan")}
            records.append(trial | failed)
            continue
        readings = [("trained", result.by_length, result.far)]
        readings += [(r.name, r.by_length, r.far) for r in result.readings if not r.cannot]
        for reading, by_length, far in readings:
            place = trial | {"reading": reading}
            for score in by_length:
                if score.bits_per_byte is not None:
                    at = {"length": score.length, "bits_per_byte": score.bits_per_byte}
                    records.append(place | at)
            longest = max(config.test_lengths)
            for score in far:
                if score.length == longest and score.far is not None:
                    start = longest - config.train_length
                    at = {"length": longest, "position": start, "bits_per_byte": score.far}
                    records.append(place | at)
        if not result.far:
            by_position = result.by_position
            for run in by_position:
                at = {"length": by_position[-1].stop, "position": run.start}
                records.append(trial | at | {"bits_per_byte": run.bits_per_byte})
        if curves:
            (near,) = [s.bits_per_byte for s in result.by_length[:1]]
            for point in result.training[:-1]:
                # As a loss on the test text, which ends where the trial ended.
                bits = point.valid - result.training[-1].valid + near
                at = {"length": config.train_length, "steps": point.step, "bits_per_byte": bits}
                records.append(trial | at)
    return records


def write_csv(path: Path, records: list[dict[str, object]], delimiter: str = ",") -> Path:
    """Write records as CSV, an empty cell where one has no value."""
    names = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, delimiter=delimiter)
        writer.writeheader()
        writer.writerows(records)
    return path
