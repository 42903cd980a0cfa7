"""The largest coordinates of each block, whole or at few bits: the codecs, and kernels for CPUs and GPUs."""
