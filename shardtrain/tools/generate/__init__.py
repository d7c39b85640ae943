"""Text from a trained model: ``shardtrain generate``. Start with ``generate_command.py``.

``trained_model.py`` opens a checkpoint as a model with its tokenizer, and ``prompts.py`` turns requests into rows of
tokens. ``engine.py`` continues the rows: ``forward_passes.py`` runs the model, ``cache.py`` keeps keys and values, and
``sampling.py`` chooses tokens. ``generated_text.py`` turns new tokens into text.
"""
