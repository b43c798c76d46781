"""Ways to run an attention: the same results, with other costs."""
