"""Collectives of gloo ranks on one machine. A run on an accelerator imports none of these modules."""
