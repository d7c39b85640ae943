"""``shardtrain test``: evaluate a checkpoint on the held-out sets of its task.

Write metrics and predictions.
"""
