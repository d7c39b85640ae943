"""Pack documents into rows of ``seq_len`` tokens: concatenated, fitted, or one document per row."""
