"""Datasets whose number of rows is unknown: virtual readers, their cursors, and packing of a stream."""
