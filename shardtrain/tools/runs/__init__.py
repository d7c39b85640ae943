"""Programs that read the folder of a run: its curves, live view, traces, goodput and repeated steps."""
