"""The error that ends a run with one line instead of a traceback."""


class RecipeError(RuntimeError):
    """A run that cannot be made as asked; the message names the reason and the remedy."""
