"""The scalings that posenc has: a new one is added here.

A line makes a scaling public and known by its name: to `lookup`, and with it to all of posenc.
"""
# ruff: noqa: I001 - in the order of posenc.names(); then those without a name there

from posenc.frequencies.scalings.proportional import Proportional as Proportional
from posenc.frequencies.scalings.linear import Linear as Linear
from posenc.frequencies.scalings.ntk import NTK as NTK
from posenc.frequencies.scalings.ntk import DynamicNTK as DynamicNTK
from posenc.frequencies.scalings.by_parts import NTKByParts as NTKByParts
from posenc.frequencies.scalings.yarn import YaRN as YaRN
from posenc.frequencies.scalings.llama3 import Llama3 as Llama3
from posenc.frequencies.scalings.longrope import LongRoPE as LongRoPE
from posenc.frequencies.scalings.linear import DynamicLinear as DynamicLinear
from posenc.frequencies.scalings.yarn import DynamicYaRN as DynamicYaRN
