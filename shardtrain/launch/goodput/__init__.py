"""Account of a run's wall time over all attempts. Training records it, and ``shardtrain goodput`` sums it up."""
