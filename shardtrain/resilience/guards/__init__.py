"""Guards of a run's numbers: non-finite steps, loss spikes, and differing replicas."""
