"""What a study keeps of the table of losses that it was read from."""

from dataclasses import dataclass

from posenc.compare.trial.config import MAX_ENTRIES
from posenc.files.sealed_json import Record, check_text_length


@dataclass(frozen=True)
class GivenTable(Record):
    """A table of losses that another program measured. Of its trials no more is known than it says:
    fields of their TrialConfig that it lacks are 0 or "".

    name: of its file, or "the table".
    loss_unit: what its losses are, in words: "nats per token".
    columns: those that it has, by posenc's names.
    notes: sentences on how it was read.
    num_sizes: sizes of models in it, of which the study has one.
    """

    name: str
    loss_unit: str
    columns: tuple[str, ...]
    notes: tuple[str, ...] = ()
    num_sizes: int = 1

    def check(self) -> None:
        for text in (self.name, self.loss_unit, *self.columns, *self.notes):
            check_text_length("a text", text, MAX_ENTRIES)
