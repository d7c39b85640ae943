"""``shardtrain evaluate``: the loss of a model on named sets of rows, and tasks of the lm-eval library."""
