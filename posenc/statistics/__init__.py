"""Statistics of studies with few seeds: paired differences, pooled scores, ranks, agreement."""
