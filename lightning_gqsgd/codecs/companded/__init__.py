"""Companded codes, whose levels are denser near zero: the codec, and its kernels for CPUs and GPUs."""
