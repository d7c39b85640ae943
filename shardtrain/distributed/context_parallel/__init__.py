"""Context parallelism: each rank holds a part of every sequence, and only attention communicates."""
