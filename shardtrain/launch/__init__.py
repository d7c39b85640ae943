"""Start and supervise the ranks of a run: signals, restarts, failures, and the account of the wall time."""
