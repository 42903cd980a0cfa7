"""Weighted merges of what members have learnt: by the clock, beside training, with members that come and go."""
