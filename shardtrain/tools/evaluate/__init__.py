"""``shardtrain evaluate``: the loss of a model on named sets of text, and tasks of the lm-eval library."""
