"""Watch a run: hangs, slow ranks, numbers that are not finite, ranks that disagree."""
