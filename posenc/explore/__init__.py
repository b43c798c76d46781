"""`posenc explore`: write an interactive page about position encodings, which is built from
explorer/."""
