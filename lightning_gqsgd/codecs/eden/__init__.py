"""EDEN, rotated coordinates at the best levels for Gaussian numbers: the codec, and its kernels for CPUs and GPUs."""
