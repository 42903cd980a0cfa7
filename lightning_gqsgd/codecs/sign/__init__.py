"""The sign codec. It uses the kernels of linear codes."""
