"""Images of the task ``image_text``: the processor of a model's folder, and batches of its inputs."""
