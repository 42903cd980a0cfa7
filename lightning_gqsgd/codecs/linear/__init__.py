"""Uniform levels with dither: the codec, and its kernels for CPUs and GPUs."""
