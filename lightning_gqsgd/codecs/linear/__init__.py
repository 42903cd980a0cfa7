"""Linear codes, whose levels are uniform: the codec, and its kernels for CPUs and GPUs."""
