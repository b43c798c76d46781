"""Measure and draw what an encoding does with position.

>>> from posenc.inspect.encoding.scores import direction
>>> shape = posenc.ModelShape(embed_dim=64, num_heads=4)
>>> direction(posenc.ALiBi(num_heads=4), shape)
'symmetric'
>>> direction(posenc.RoPE(head_dim=16, interleaved=False), shape)
'directed'
"""
