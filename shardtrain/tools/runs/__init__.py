"""Tools that read run folders: charts, live view, traces, goodput and replay of steps."""
