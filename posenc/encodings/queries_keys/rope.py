"""Rotary position embeddings."""

import inspect
from dataclasses import MISSING, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.encodings.base.constructor_arguments import UnknownOption
from posenc.encodings.base.position_encoding import ModelShape
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.encodings.queries_keys.rotation import Rotation
from posenc.encodings.queries_keys.rotation_from_config import rotation_arguments
from posenc.frequencies.scalings.lookup import SCALINGS
from posenc.frequencies.scalings.scaling import Frequencies, Scaling, rope_frequencies
from posenc.frequencies.series import inverse_frequencies
from posenc.positions.tokens import Positions


class RoPE(Rotation):
    """Rotate each pair of channels of q and k by an angle proportional to the position.

    (q_a, q_b) -> m (q_a cos - q_b sin, q_b cos + q_a sin), angle = position * inv_freq[t]

    inv_freq[t] = rope_theta^(-2t/rotary_dim) and m = 1, unless changed by `scaling`. The score of a
    rotated query and key depends only on the difference of their positions.

    Args:
        head_dim: size of one head.
        rope_theta: base of the geometric series of frequencies.
        interleaved: pairs are (2t, 2t+1), as in RoFormer, GPT-J and Meta's Llama; False:
            (t, t + rotary_dim/2), as in GPT-NeoX and Hugging Face's Llama. Required, because a
            checkpoint needs the layout that it was trained with.
        rotary_dim: number of channels that rotate, the first ones; None means all.
        partial_rotary_factor: rotary_dim as a fraction of head_dim, rounded down to an even number.
        scaling: scaling of the frequencies for longer contexts, such as posenc.YaRN(4.0, 4096). If
            it depends on the length, pass the length to `prepare`, and do not reuse cached keys at
            another length.

    Shapes: q (batch, num_heads, q_len, head_dim), k (batch, num_kv_heads, kv_len, head_dim) -> the
    same.
    Units: positions in tokens, integer or real. Precision: exact angles, see
    ExactFrequencies; rotated in float32, rounded once.
    Raises: ValueError if rotary_dim is odd or exceeds head_dim.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.

    >>> rope = posenc.RoPE(head_dim=64, interleaved=False)
    >>> q, k = rope(torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64), torch.arange(10))
    >>> q.shape, k.shape
    (torch.Size([1, 8, 10, 64]), torch.Size([1, 2, 10, 64]))
    """

    claims = replace(Rotation.claims, source="Su et al. 2021, arXiv:2104.09864, section 3.2")
    rotates_last_channels: ClassVar[bool] = False
    """True if the last channels of a head rotate, not the first."""

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        rotary_dim: int | None = None,
        partial_rotary_factor: float | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(head_dim, interleaved=interleaved)
        class_name = type(self).__name__
        if partial_rotary_factor is not None:
            if rotary_dim is not None:
                raise ValueError(
                    f"{class_name}: give rotary_dim or partial_rotary_factor, not both."
                )
            if partial_rotary_factor > 1:
                raise ValueError(
                    f"{class_name}: partial_rotary_factor must be at most 1, got "
                    f"{partial_rotary_factor}."
                )
            rotary_dim = partial_rotary_dim(head_dim, partial_rotary_factor)
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        _check_rotary_dim(class_name, rotary_dim, head_dim)
        self.rope_theta = rope_theta
        self.rotary_dim = rotary_dim
        self.scaling = scaling
        # The length at which compiled code computes frequencies by an operator; None: they are
        # those of `exact_frequencies`. Only `prepare` sets it.
        self._length_for_operator: int | None = None
        self._unscaled_frequencies: ExactFrequencies | None = None
        if scaling is not None:
            self._prepare_for_scaling(scaling)
        self._set_frequencies(self.frequencies())

    def _prepare_for_scaling(self, scaling: Scaling) -> None:
        """Set the claims of RoPE with this scaling, and store the arguments and unscaled
        frequencies from which its cos and sin are computed. Raise TypeError if `scaling` is no
        Scaling."""
        if not isinstance(scaling, Scaling):
            raise TypeError(
                f"{type(self).__name__}: scaling must be a method, such as "
                f"posenc.YaRN(4.0, 4096), or None, got {scaling!r}. "
                "posenc.create('yarn', shape, factor=4.0) builds one by name."
            )
        self._frequency_arguments_key = store_frequency_arguments(
            self.rotary_dim, self.rope_theta, scaling
        )
        if scaling.exempt_tokens:
            unscaled_inv_freq = inverse_frequencies(self.rotary_dim, self.rope_theta)
            self._unscaled_frequencies = ExactFrequencies(unscaled_inv_freq)
        self.claims = replace(
            self.claims,
            source=scaling.source,
            cache_safe=not scaling.depends_on_length,
            shift_invariant=not scaling.exempt_tokens,
            own_scale=self.frequencies().attention_factor != 1 or scaling.logit_scale != 1,
        )

    @classmethod
    @explain_misfits
    def from_shape(
        cls,
        shape: ModelShape,
        *,
        scaling: Scaling | str | None = None,
        partial_rotary_factor: float | None = None,
        **options: Any,
    ) -> Self:
        """Build the encoding for a model. If `scaling` is a name, its parameters are read from
        options; original_max_positions defaults to the shape's train_length."""
        if isinstance(scaling, str):
            scaling = _build_scaling(cls, scaling, shape.train_length, options)
        if scaling is not None:
            options["scaling"] = scaling
        if partial_rotary_factor is not None:
            if "rotary_dim" in options:
                raise ValueError(
                    f"{cls.__name__}: give rotary_dim or partial_rotary_factor, not both."
                )
            assert shape.head_dim is not None
            options["rotary_dim"] = partial_rotary_dim(shape.head_dim, partial_rotary_factor)
        return super().from_shape(shape, **options)

    @classmethod
    @explain_misfits
    def from_config(cls, config: Any, kind: str | None = None, **options: Any) -> Self:
        """Build the rotation of a model from its config: a dict, a config of transformers, or the
        path of config.json or of its folder.

        Every rope_type and every spelling that `posenc doctor` knows is accepted, and the
        frequencies are checked against the doctor's. If the model multiplies q . k by another
        factor than 1/sqrt(head_dim), that factor is not included. For DeepSeek's latent attention
        the result rotates the rotary part of a head only. Use DecoupledRoPE.from_config for
        DeepSeek-V4, and MRoPE.from_config for a config with mrope_section.

        Args:
            kind: the kind of layer to build for, if layers of several kinds rotate differently:
                "full_attention", "sliding_attention", or "main" and "compress" in DeepSeek-V4.
            options: more arguments of the class. For a model_type that posenc does not know give
                interleaved=True or False. It is built if the config has rope_theta, the size of a
                head and nothing else about rotation.

        Raises: ValueError for a model_type, a kind of layer or a rotation that posenc does not
        know. For an unknown model_type the message has the call that builds the rotation.

        >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
        >>> rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
        >>> config = {"model_type": "llama", **sizes, "rope_parameters": rope}
        >>> posenc.RoPE.from_config(config).scaling
        Linear(factor=4.0)
        """
        class_name = cls.__name__
        arguments = rotation_arguments(config, kind, class_name, options.get("interleaved"))
        if arguments.pop("rotates_last_channels") != cls.rotates_last_channels:
            rotated_end = "first" if cls.rotates_last_channels else "last"
            raise ValueError(
                f"{class_name}: this model rotates the {rotated_end} channels of each head: use "
                f"posenc.{'RoPE' if cls.rotates_last_channels else 'DecoupledRoPE'}.from_config."
            )
        takes_sections = "sections" in inspect.signature(cls).parameters
        if takes_sections != ("sections" in arguments):
            raise ValueError(
                f"{class_name}: this config has {'no' if takes_sections else 'an'} mrope_section: "
                f"use posenc.{'RoPE' if takes_sections else 'MRoPE'}.from_config."
            )
        interleaved = options.get("interleaved", arguments["interleaved"])
        if interleaved is not arguments["interleaved"]:
            raise ValueError(
                f"{class_name}: this model has interleaved={arguments['interleaved']}, "
                f"got {interleaved!r}."
            )
        return cls(**{**arguments, **options})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.scaling is not None:  # unpickled: this process may not have stored the arguments
            store_frequency_arguments(self.rotary_dim, self.rope_theta, self.scaling)

    def frequencies(self, length: int | None = None) -> Frequencies:
        """Return inv_freq and the factor of cos and sin at this length in tokens; None: the
        training length."""
        return rope_frequencies(self.rotary_dim, self.rope_theta, self.scaling, length)

    def scale(self, head_dim: int) -> float:
        """Return the factor of q . k in the scores: 1/sqrt(head_dim), times the logit_scale of the
        scaling if there is one."""
        return super().scale(head_dim) * (1 if self.scaling is None else self.scaling.logit_scale)

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        # An encoding is cache_safe if and only if its frequencies do not depend on the length.
        has_training_frequencies = length is None or self.claims.cache_safe
        if has_training_frequencies:
            return super().prepare(positions)
        prepared = self.with_table_cache()
        # Decimal arithmetic cannot be traced, so compiled code computes the frequencies by an
        # operator.
        if torch.compiler.is_compiling():
            prepared._length_for_operator = length
            prepared._remembered_cos_sin = ()
        else:
            prepared._set_frequencies(self.frequencies(length), self.exact_frequencies.axes)
        if isinstance(positions, Tensor):
            prepared._remembered_cos_sin = (prepared.cos_sin_to_remember(positions),)
        return prepared

    def _compute_cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin at positions in a tensor, (*positions.shape, pairs), times
        attention_factor.

        Where position < scaling.exempt_tokens: by the original frequencies, without
        attention_factor.
        """
        if self._length_for_operator is None:
            cos, sin = super()._compute_cos_sin(positions, dtype)
        else:
            axes = list(self.exact_frequencies.axes or ())
            cos, sin = cos_sin_at_length(
                positions, self._length_for_operator, self._frequency_arguments_key, axes
            )
            cos = cos.to(dtype)
            sin = sin.to(dtype)
        if self._unscaled_frequencies is None or self.scaling is None:
            return cos, sin
        is_exempt = (positions < self.scaling.exempt_tokens)[..., None]
        unscaled_cos, unscaled_sin = self._unscaled_frequencies.cos_sin(positions, dtype)
        return torch.where(is_exempt, unscaled_cos, cos), torch.where(is_exempt, unscaled_sin, sin)


def _check_rotary_dim(class_name: str, rotary_dim: int, head_dim: int) -> None:
    """Raise ValueError unless rotary_dim is even and between 2 and head_dim."""
    if rotary_dim % 2:
        argument_name = "head_dim" if rotary_dim == head_dim else "rotary_dim"
        even_dim = rotary_dim - 1
        raise ValueError(
            f"{class_name}: {argument_name} must be even, got {rotary_dim}. "
            f"Use rotary_dim={even_dim} to rotate only the first {even_dim} channels."
        )
    if not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"{class_name}: rotary_dim must be between 2 and head_dim={head_dim}, got {rotary_dim}."
        )


def partial_rotary_dim(head_dim: int, partial_rotary_factor: float) -> int:
    """Return head_dim * partial_rotary_factor, rounded down to an even number of channels; at least
    2."""
    return max(2, int(head_dim * partial_rotary_factor) // 2 * 2)


def _build_scaling(cls: type, name: str, train_length: int, options: dict[str, Any]) -> Scaling:
    """Build the scaling called `name` from its parameters in `options`, and remove these from
    `options`.

    cls: class of the rotation, for messages. train_length: default of original_max_positions, in
    tokens.
    Raises: ValueError for an unknown name; TypeError for unknown options or missing parameters.
    """
    if name not in SCALINGS:
        raise ValueError(f"{cls.__name__}: unknown scaling {name!r}; known: {', '.join(SCALINGS)}.")
    scaling_class = SCALINGS[name]
    defaults = {f.name: f.default for f in fields(scaling_class)}  # pyright: ignore[reportArgumentType]
    option_names = (*defaults, *inspect.signature(cls).parameters, "partial_rotary_factor")
    accepted_names = [
        option_name for option_name in dict.fromkeys(option_names) if option_name != "scaling"
    ]
    if set(options) - set(accepted_names):
        raise UnknownOption(f"{cls.__name__} with scaling {name!r}", options, accepted_names)
    arguments = {
        option_name: options.pop(option_name) for option_name in defaults if option_name in options
    }
    if "original_max_positions" in defaults:
        arguments.setdefault("original_max_positions", train_length)
    missing_names = [
        option_name
        for option_name, default in defaults.items()
        if default is MISSING and option_name not in arguments
    ]
    if missing_names:
        raise TypeError(f"{cls.__name__}: scaling {name!r} needs {' and '.join(missing_names)}.")
    return scaling_class(**arguments)


_STORED_FREQUENCY_ARGUMENTS: dict[str, tuple[int, float, Scaling]] = {}
"""Arguments rotary_dim, rope_theta and scaling of `rope_frequencies`, by the key that
`store_frequency_arguments` returned: an operator of torch takes texts, but no dataclasses such as a
Scaling."""


def store_frequency_arguments(rotary_dim: int, rope_theta: float, scaling: Scaling) -> str:
    """Store arguments of `rope_frequencies` in this process. Return a key, with which
    `cos_sin_at_length` finds them; equal arguments have the same key."""
    key = f"{rotary_dim}, {rope_theta!r}, {scaling!r}"
    _STORED_FREQUENCY_ARGUMENTS[key] = rotary_dim, rope_theta, scaling
    return key


# An operator, because a tracer cannot follow decimal arithmetic. Its schema is written out, because
# torch 2.6 does not derive one from list[int]. SymInt: one graph serves all lengths.
@torch.library.custom_op(
    "posenc::cos_sin_at_length",
    mutates_args=(),
    schema="(Tensor positions, SymInt length, str key, int[] axes) -> (Tensor, Tensor)",
)
def cos_sin_at_length(
    positions: Tensor, length: int, key: str, axes: list[int]
) -> tuple[Tensor, Tensor]:
    """Return float64 cos and sin at positions, each (*positions.shape, pairs), by the frequencies
    that a scaling has at the current `length` in tokens, times its attention_factor.

    If positions have components, (..., components), the tables are (..., pairs).

    key: what `store_frequency_arguments` returned in this process; KeyError for any other.
    axes: the component of positions that rotates each pair; empty if positions have no components.
    """
    inv_freq, factor = rope_frequencies(*_STORED_FREQUENCY_ARGUMENTS[key], length)
    return ExactFrequencies(inv_freq, axes or None).cos_sin(positions, torch.float64, factor)


@cos_sin_at_length.register_fake
def _empty_cos_sin(
    positions: Tensor, length: int, key: str, axes: list[int]
) -> tuple[Tensor, Tensor]:
    """Return two uninitialised tensors in the shapes and dtype of `cos_sin_at_length`'s results,
    from which tracers read shapes."""
    rotary_dim, _, _ = _STORED_FREQUENCY_ARGUMENTS[key]
    shape_of_tokens = positions.shape[:-1] if axes else positions.shape
    table_shape = (*shape_of_tokens, rotary_dim // 2)
    return (
        positions.new_empty(table_shape, dtype=torch.float64),
        positions.new_empty(table_shape, dtype=torch.float64),
    )
