"""Facts that several parts of the package need: file kinds and accelerators. Standard library only."""
