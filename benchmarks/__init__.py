"""Measurements: kernels, reducers, training steps, and a network of shaped links to make them on."""
