"""Trellis codes, rotated coordinates at levels along a path of a trellis: the codec, and kernels for CPUs and GPUs."""
