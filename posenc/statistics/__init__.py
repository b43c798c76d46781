"""What few seeds can tell: paired differences, pooled scores, ranks, agreement."""
