"""What a reader needs to repeat a study: text, model, training, seeds, versions, hardware."""

from collections.abc import Mapping

from posenc.compare.results import Study
from posenc.compare.trial.config import TrialConfig
from posenc.tasks.known import TASKS


def facts_to_repeat(study: Study) -> Mapping[str, object]:
    """Return what a reader needs to repeat the study, by name."""
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
    files = "file" if corpus.num_files == 1 else "files"
    return {
        "text": f"{corpus.name}, {corpus.num_files:,} {files}, hash {corpus.hash}",
        "split": (
            f"{corpus.split}: {corpus.train_bytes:,} bytes to train on, {corpus.valid_bytes:,} to "
            f"validate, {corpus.test_bytes:,} to test"
        ),
    }


def _model_fact(config: TrialConfig) -> str:
    """Return the sizes of the trials' model."""
    return (
        f"decoder, {config.layers} layers, width {config.width}, {config.heads} heads on "
        f"{config.kv_heads} key/value heads, projections {config.projections}"
    )


def _training_fact(trial: TrialConfig, study: Study) -> tuple[str, str]:
    """Return how the trials of this one's task were trained, as the name of a fact and its text."""
    name = "training" if trial.is_on_text else f"training on {trial.task}"
    unit = "bytes" if trial.is_on_text else TASKS[trial.task].length_unit
    peaks = sorted({t.lr for t in study.trials if t.task == trial.task})
    rate = f"peak learning rate {peaks[0]:g}"
    if len(peaks) > 1:
        rate = f"peak learning rates from {peaks[0]:g} to {peaks[-1]:g} as in their table"
    factors = sorted({t.encoding_lr for t in study.trials if t.task == trial.task})
    tables = f"tables of encodings {factors[0]:g} times it"
    if len(factors) > 1:
        tables = f"tables of encodings {factors[0]:g} to {factors[-1]:g} times it"
    compiled = ", compiled" if trial.compile else ""
    return name, (
        f"{trial.steps:,} steps of {trial.batch} × {trial.train_length:,} {unit}, {rate}, "
        f"{tables}, {trial.precision} on {trial.device}{compiled}"
    )
