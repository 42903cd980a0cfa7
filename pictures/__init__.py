"""The look that all pictures of this repository share."""
