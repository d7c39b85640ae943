"""``shardtrain test``: a trained model on the held-out sets of its task, its metrics and predictions in files."""
