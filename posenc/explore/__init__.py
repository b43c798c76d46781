"""`posenc explore`: write a page on which one moves position encodings, built from explorer/."""
