"""The start, the reports and the checkpoints that all ways to reduce have in common."""
