"""Give the model before its tuning back, whose predictions on short texts are to be kept."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from posenc.hf.lora import LoRALinear, adapters_off
from posenc.hf.model_rotation import Rotation
from posenc.hf.sharding import is_divided
from posenc.models.generating import eval_mode


class Teacher:
    """Give the original model, which is another one than the model that is tuned.

    identity: its rotary keys, True without any; they tell tunings with other teachers apart.
    """

    def __init__(self, model: Any) -> None:
        self.identity = rotary_keys(model)
        self.model = model

    def as_before(self) -> AbstractContextManager[Any]:
        """Return a context manager that yields the original model, in evaluation mode."""
        return nullcontext(self.model)


def rotary_keys(model: Any) -> Any:
    """Return a copy of the rope_parameters of the model's config; True if it has none."""
    return copy.deepcopy(model.config.to_dict().get("rope_parameters", True))


class SameWeights(Teacher):
    """Give the original model back from the weights of a model that LoRA tunes: without adapters,
    with the rotation and the embeddings and norms of before. Nothing but these is copied.

    Made before the model is stretched. `keep_trained_weights` is called once the adapters are
    there.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.rotation = Rotation(model)
        self.kept_weights: dict[str, Tensor] = {}

    def keep_trained_weights(self) -> None:
        """Copy the weights that LoRA tunes as a whole: embeddings and norms, unless only adapters
        are trained."""
        adapter_weights = {
            id(weight)
            for module in self.model.modules()
            if isinstance(module, LoRALinear)
            for weight in (module.down, module.up)
        }
        self.kept_weights = {
            name: parameter.detach().clone()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in adapter_weights
        }

    @contextmanager
    def as_before(self) -> Iterator[Any]:
        """Yield the model as it was, in evaluation mode; all is restored after the block."""
        with ExitStack() as exit_stack:
            exit_stack.enter_context(adapters_off(self.model))
            exit_stack.enter_context(self.rotation.applied())
            exit_stack.enter_context(self._weights_of_before())
            exit_stack.enter_context(eval_mode(self.model))
            yield self.model

    @contextmanager
    def _weights_of_before(self) -> Iterator[None]:
        """Let the trained embeddings and norms have their old values inside the block."""
        parameters = dict(self.model.named_parameters())
        tuned_weights = {name: parameters[name].data for name in self.kept_weights}
        parts = {name: w.clone() for name, w in tuned_weights.items() if is_divided(w)}
        try:
            for name, weight in self.kept_weights.items():
                self._set(parameters[name], weight)
            yield
        finally:
            for name, weight in (tuned_weights | parts).items():
                self._set(parameters[name], weight)

    @staticmethod
    def _set(parameter: nn.Parameter, values: Tensor) -> None:
        """Give a parameter values: where it is divided among processes in place, because their
        layers are gathered from its memory."""
        if is_divided(parameter):
            parameter.data.copy_(values)
        else:
            parameter.data = values
