"""Kernels that only a CPU uses. A run on an accelerator imports none of these modules."""
