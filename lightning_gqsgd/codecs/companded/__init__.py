"""Levels that lie denser near zero: the codec, and its kernels for CPUs and GPUs."""
