"""What watches a run: hangs, signals, numbers that are not finite, where the time went."""
