"""Processes of a run: who starts them, on which hardware, with which environment variables."""
