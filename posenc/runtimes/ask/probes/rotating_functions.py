"""Call the functions by which attentions of transformers rotate queries and keys: which channels
they pair, and which tables of cos and sin they stop at.

Part of the probe of transformers, see transformers_probe.py.
"""

import inspect
import re
import sys

from probing import error_in_one_line

ROTATED_WIDTH_NAMES = ("qk_rope_head_dim", "rotary_ndims", "rotary_dim")
"""Names by which an attention keeps how many channels of a head it rotates, if not all."""
SLICE_OF_QUERIES = re.compile(r"\b(query|q)\w*\[\.\.\., ?:|torch\.chunk\((query|q)\w*, ")
"""Attention itself cuts the rotated part out of queries, by a slice or, in earlier releases, a
chunk."""
CALL_OF_ROTATION = re.compile(r"(\w*apply_\w*rot\w*)\(")


def forward_source(module):
    """Return the source of a module's forward; empty if there is none to read."""
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):  # compiled, or made at runtime
        return ""


def rotating_functions(attentions):
    """Yield one attention of each class and width, with the function by which its forward rotates q
    and k. Those that rotate by a method, or nothing, are left out."""
    module_by_type_and_width = {
        (type(module), rotated_channels(module)): module for module in attentions.values()
    }
    for module in module_by_type_and_width.values():
        source = forward_source(module)
        function_names = CALL_OF_ROTATION.findall(source)
        if "rope_interleave" in source and len(function_names) > 1:
            is_interleaved = bool(
                getattr(getattr(module, "config", None), "rope_interleave", False)
            )
            function_names = [
                name for name in function_names if ("interleave" in name) == is_interleaved
            ] or function_names
        python_module = sys.modules[type(module).__module__]
        for name in function_names[:1]:
            function = getattr(python_module, name, None)
            if function is not None:
                yield module, function


def has_grid_positions(config):
    """Return True if a config is of patches of an image, whose positions have several components:
    a row of frequencies is then that of one of them."""
    return any(hasattr(config, name) for name in ("patch_size", "image_size"))


def why_rotating_stops(attentions, rotations):
    """Return the error with which a forward pass stops where cos and sin are narrower or wider than
    what the attentions rotate by them; "" if there is none.

    Attentions whose number of rotated channels is unknown are not asked. There is an error only
    where all others fail for some row: then it is that of the first of them.

    rotations: answers of rotary modules, with their `inv_freq`, half as long as cos and sin are
    wide.
    """
    modules_and_functions = [
        pair for pair in rotating_functions(attentions) if rotated_channels(pair[0])
    ]
    for rotation in rotations:
        width = 2 * len(rotation["inv_freq"])
        reasons = [
            why_width_stops(module, function, width) for module, function in modules_and_functions
        ]
        if reasons and all(reasons):
            return reasons[0]
    return ""


def why_width_stops(module, function, width):
    """Call a function that rotates queries, and return its error as text if cos and sin have
    `width` channels, and the queries the other number that `module` rotates; "" if it runs.

    Everything passed is zeros. The arguments are those with which the function runs if the queries
    have `width` channels too; "" if none are found. rotated_channels(module) must not be None.
    """
    num_rotated = rotated_channels(module)
    if num_rotated == width:
        return ""
    for arguments in argument_variants(width):
        if not error_of_call(function, width, arguments):
            return error_of_call(function, num_rotated, arguments)
    return ""


def rotated_channels(attention):
    """Return how many channels of each head the function that rotates is given by an attention;
    None where the attention cuts them out itself, and keeps no number of them.

    It is the number that the attention keeps under a name of ROTATED_WIDTH_NAMES, else its
    head_dim: those attentions give the function whole heads."""
    for name in ROTATED_WIDTH_NAMES:
        if hasattr(attention, name):
            return getattr(attention, name)
    if SLICE_OF_QUERIES.search(forward_source(attention)):
        return None
    return getattr(attention, "head_dim", None)


def argument_variants(width):
    """Return the six tuples of arguments to try after q, for functions that rotate.

    The string "k" stands for the keys. Four tuples have it, before cos and sin of `width` channels,
    cos and sin of one channel a pair, those of three axes with the list of sections, or one complex
    tensor of one number a pair. The last two are cos and sin of both widths without the keys.
    """
    import torch

    full_table, half_table = torch.zeros(1, 3, width), torch.zeros(1, 3, width // 2)
    table_per_axis = torch.zeros(3, 1, 3, width)
    complex_table = torch.zeros(1, 3, width // 2, dtype=torch.complex64)
    variants_with_both = [
        (full_table, full_table),
        (half_table, half_table),
        (table_per_axis, table_per_axis, [width // 2, 0, 0]),
    ]
    return [
        ("k", *arguments) for arguments in (*variants_with_both, (complex_table,))
    ] + variants_with_both[:2]


def error_of_call(function, num_channels, arguments):
    """Return the words with which a function that rotates stops; "" if it runs.

    It is called with zeros: q of so many channels, and `arguments`, in which a string stands for
    the keys.
    """
    import torch

    q = torch.zeros(1, 1, 3, num_channels)
    other_arguments = [q if isinstance(value, str) else value for value in arguments]
    try:
        function(q, *other_arguments)
    except Exception as error:
        return error_in_one_line(error)
    return ""


def has_interleaved_pairs(attentions):
    """Return whether attention turns channels (2i, 2i + 1) together, by calling the function that
    its forward names with cos 0 and sin 1: the first channel then shows its partner."""
    import torch

    for _, function in rotating_functions(attentions):
        x = torch.arange(1.0, 9.0).reshape(1, 1, 1, 8)
        try:
            turned = function(x, x, torch.zeros(1, 1, 8), torch.ones(1, 1, 8))[0]
        except Exception:  # other arguments
            continue
        value_of_partner = abs(float(turned.flatten()[0]))
        if value_of_partner in (2.0, 5.0):
            return value_of_partner == 2.0
    return None
