"""Save a run and resume it on any mesh.

``folder.py`` chooses and loads a checkpoint, and ``save.py`` writes one. ``manifest.py`` defines
the format. ``tensors.py`` copies bytes between tensors and files, and ``async_save.py`` does so
during training. ``interval.py`` decides when to save, and ``best.py`` which checkpoint to keep.
``files.py``, ``lease.py`` and ``retention.py`` change folders on disk. Only ``folder``, ``save``,
``async_save``, ``tensors`` and ``collectives`` import torch, so listing a folder is fast.
"""
