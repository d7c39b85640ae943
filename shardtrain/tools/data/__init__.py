"""The verbs of ``shardtrain data``: one file each, with ``main(words)``, which gives the exit status."""
