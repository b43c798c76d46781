"""Ways to run place 3: the same results, with other costs. Each module has refuse, cost and run."""
