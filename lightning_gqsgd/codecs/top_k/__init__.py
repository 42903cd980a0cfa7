"""Top-k codes, the largest coordinates of each block, whole or at few bits: codecs and kernels for CPUs and GPUs."""
