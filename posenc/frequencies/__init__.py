"""RoPE's frequencies and their scalings as plain numbers, without torch and NumPy.

`series` has the geometric series with 50 digits, and turns frequencies into integers; `scalings`
has one file for each scaling and what they share; `float64_formulas` has the formulas as runtimes
compute them.
"""
