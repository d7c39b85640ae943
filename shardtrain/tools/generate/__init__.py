"""Generate text with a trained model: ``shardtrain generate``. Start with ``generate_command.py``.

``trained_model.py`` opens a checkpoint as a model with its tokenizer. ``prompts.py`` encodes the prompts.
``engine.py`` generates new tokens: ``forward_passes.py`` runs the model, ``cache.py`` stores keys and values,
and ``ops/sampling.py`` chooses tokens. ``generated_text.py`` decodes the new tokens.
"""
