"""Attention that no single kernel of PyTorch's gives: within packed documents, within a window, over parts of the keys.

Plain tensors on one device; how ranks share a sequence is in ``distributed/context_parallel/gather.py``.
"""
