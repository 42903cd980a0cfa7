"""Training recipes: `run.py` trains once, `compare.py` trains one task under several strategies."""
