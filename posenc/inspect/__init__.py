"""Measure and draw what encodings, models and modules do with position.

>>> from posenc.inspect.encoding.scores import direction
>>> shape = posenc.ModelShape(embed_dim=64, num_heads=4)
>>> direction(posenc.ALiBi(num_heads=4), shape)
'symmetric'
>>> direction(posenc.RoPE(head_dim=16, interleaved=False), shape)
'directed'
>>> (sheet,) = posenc.inspect.measure_encodings("rope", shape=shape)
>>> sheet.direction, sheet.holds["shift"]
('directed', True)
"""

from posenc.lazy import package_hooks as _package_hooks

# No submodule may have the name of a function here: importing it would replace the function.
__getattr__, __dir__, __all__ = _package_hooks(
    __name__,
    __file__,
    new_name_by_old={"run": "measure_encodings(names) or measure_model(folder)"},
)
