"""Floating-point numbers, which the backend adds up."""
