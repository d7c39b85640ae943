"""Kernels and fused functions on plain tensors; no meshes here."""
