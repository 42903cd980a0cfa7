"""Networks and images that recipes train and benchmarks measure; this package imports neither of them."""
