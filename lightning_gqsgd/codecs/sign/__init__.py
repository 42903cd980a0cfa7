"""Signs, which have the kernels of linear codes."""
