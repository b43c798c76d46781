"""RoPE's frequencies and their scalings as plain numbers, without torch and NumPy.

`series` has the geometric series with 50 digits, `scaling` what all scalings share, `scalings` one
file for each, `registry` the scalings by name. `fixed_point` turns frequencies into integers;
`floats` has the formulas in float64, as runtimes compute them.
"""
