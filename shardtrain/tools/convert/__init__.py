"""The verbs ``import``, ``export`` and ``merge``: weights between checkpoints, Hugging Face folders and adapters."""
