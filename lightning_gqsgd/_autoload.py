"""Entry point that `import torch` calls (group `torch.backends`): standard library only, never raises."""


def install() -> None:
    """Register the Lightning strategies when Lightning is imported."""
