"""Turned coordinates at the levels along a path of a trellis: the codec, and its kernels for CPUs and GPUs."""
