"""Documents to rows of ``seq_len`` tokens: concatenated, fitted, or one document a row."""
