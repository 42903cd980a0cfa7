"""Weighted merges of the members' changes: by the clock, during training, with members that come and go."""
