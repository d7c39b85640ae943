"""What knows nothing of training: errors, units, logs, small files."""
