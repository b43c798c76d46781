"""RoPE's frequencies and their scalings as plain numbers, without torch and NumPy.

`series` has the geometric series with 50 digits, `scalings` one file for each scaling and what they
share. `fixed_point` turns frequencies into integers; `float64_formulas` are the formulas as
runtimes compute them.
"""
