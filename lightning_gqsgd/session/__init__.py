"""How any way to reduce starts and reports, and what its checkpoints hold."""
