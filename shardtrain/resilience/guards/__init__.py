"""What watches the numbers of a run: steps that are not finite, spikes, ranks that ought to agree and do not."""
