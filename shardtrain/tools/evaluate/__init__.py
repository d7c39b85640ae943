"""``shardtrain evaluate``: loss of a model on named datasets, and tasks of the lm-eval library."""
