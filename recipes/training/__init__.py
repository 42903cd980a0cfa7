"""One training run: from a configuration to metrics, a checkpoint and a result file."""
