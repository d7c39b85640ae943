"""The verbs of ``shardtrain data``: one file each, with ``main(words)``, which gives the exit status.

``words`` are those after the verb. A verb may use everything of this package but the command line; nothing but the
command line uses a verb. It imports torch only where it needs it, inside functions.
"""
