"""Saving a run and continuing it on any mesh.

``folder.py`` decides which checkpoint is loaded, ``save.py`` writes one; ``manifest.py`` is the format; ``tensors.py``
moves bytes between tensors and files; ``async_save.py`` does so during training; ``interval.py`` and ``best.py``
say when and which; ``files.py``, ``lease.py`` and ``retention.py`` hold what must be right on disk. None of them but
``folder``, ``save``, ``async_save``, ``tensors`` and ``collectives`` imports torch, so that a folder is listed at once.
"""
