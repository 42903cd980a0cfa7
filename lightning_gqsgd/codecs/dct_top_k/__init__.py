"""The code of DeMo: the largest coordinates of each block's cosine transform."""
