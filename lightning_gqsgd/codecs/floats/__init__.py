"""Floating-point numbers without codes. The backend's own all-reduce adds them."""
