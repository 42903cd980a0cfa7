"""Measurements of kernels, reducers, errors and training steps; `netlab` gives them hosts with slow links."""
