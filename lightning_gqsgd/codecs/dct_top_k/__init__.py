"""The largest coordinates of a block's cosine transform: DeMo's code."""
