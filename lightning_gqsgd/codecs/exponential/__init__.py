"""Exponential codes, whose levels are powers of two: the codec, and its kernels for CPUs and GPUs."""
