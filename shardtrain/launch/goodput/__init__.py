"""Account of a run's wall time over all attempts. Written during training, summed by ``shardtrain goodput``."""
