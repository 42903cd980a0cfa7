"""Ranks that come and go, by torchft: a process group with quantised all-reduces, and the members of local steps."""
