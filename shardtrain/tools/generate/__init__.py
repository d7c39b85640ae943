"""Text from a trained model: ``shardtrain generate``. ``command.py`` is the way through it; start there.

``opening.py`` opens a checkpoint as a model with its tokenizer, ``prompts.py`` turns what is asked into rows of tokens,
``engine.py`` continues them (``forward.py`` runs the model, ``cache.py`` keeps keys and values, ``sampling.py``
chooses), ``text.py`` turns new tokens into text.
"""
