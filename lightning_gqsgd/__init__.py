"""Quantised allreduce for PyTorch DDP and Lightning."""
