"""Tensor and sequence parallelism: layers split over ranks, and sequences split between them."""
