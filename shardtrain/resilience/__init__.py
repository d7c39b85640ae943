"""Detection of faults during a run: hangs, slow ranks, non-finite numbers, and ranks that disagree."""
