"""Powers of two: the codec, and its kernels for CPUs and GPUs."""
