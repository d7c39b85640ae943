"""The verbs of ``shardtrain data``: one file each. Its ``main(words)`` returns the exit status."""
