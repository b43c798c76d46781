"""Ways to run an attention, with the same results at different costs."""
