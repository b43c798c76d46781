"""A model_type that is missing, or names another family than the class in architectures."""

from collections.abc import Iterator

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, join_runtimes, rule
from posenc.runtimes.families import (
    RUNTIMES_CHOOSING_BY_CLASS,
    class_of_unknown_code,
    families_of_class,
    first_class,
    is_named_like,
)


@rule("PD050", "E")
def report_missing_model_type(case: Case) -> Iterator[Hit]:
    """Report a config without a model_type."""
    if case.metadata is None and not isinstance(case.source.config.get("model_type"), str):
        yield Hit(
            f"there is no model_type; by its class this is a {case.model.model_type}",
            concerned=case.named_and_known(("transformers-4", "transformers-5", "vllm", "sglang")),
            affected=ALL_RUNTIMES,
            cure=f'Write "model_type": "{case.model.model_type}".',
        )


@rule("PD048", "E")
def report_class_of_another_family(case: Case) -> Iterator[Hit]:
    """Report a class in architectures that belongs to another family than model_type, or that
    posenc does not know."""
    if case.metadata is not None or not case.model.is_known:
        return
    config = case.source.config
    class_name = first_class(config)
    model_type = config.get("model_type", case.model.model_type)
    if class_name is None or not isinstance(model_type, str):
        return
    if class_of_unknown_code(config, case.model.model_type) is not None:
        yield _hit_of_class(
            case, class_name, model_type, "which posenc does not know", RUNTIMES_CHOOSING_BY_CLASS
        )
        return
    other_families = families_of_class(class_name)
    if other_families and model_type not in other_families:
        if not is_named_like(class_name, case.model.model_type, model_type, exactly=True):
            whose = f"of {min(other_families, key=len)}"
            yield _hit_of_class(case, class_name, model_type, whose, ALL_RUNTIMES)


def _hit_of_class(
    case: Case, class_name: str, model_type: str, whose: str, affected: tuple[str, ...]
) -> Hit:
    """Return the hit for a class in architectures that is none of the model_type. whose: whose
    class it is, in words; affected: the runtimes that choose their code by the class."""
    right_class = case.model.facts.get("architecture", "")
    is_of_another = affected == ALL_RUNTIMES
    note_on_choice = "" if is_of_another else f"; {join_runtimes(affected)} choose the code by it"
    shown_name = class_name or "an empty name"
    return Hit(
        f"architectures is {shown_name}, {whose}{note_on_choice}, and model_type is {model_type}",
        concerned=(),
        affected=affected,
        is_contradiction=is_of_another,
        cure=f'If model_type is right, write "architectures": ["{right_class}"]; if the class is '
        "right, write its model_type.",
    )
