"""Saving a run and continuing it on any mesh.

``folder.py`` decides which checkpoint; ``manifest.py`` is the format; ``tensors.py`` moves bytes between tensors and
files; ``files.py``, ``lease.py`` and ``retention.py`` hold what must be right on disk. None of them but ``folder``,
``tensors`` and ``agree`` imports torch, so that a folder can be listed and verified at once.
"""
