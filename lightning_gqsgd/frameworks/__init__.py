"""Adapters to training frameworks. Each imports its framework, and nothing in the core imports them."""
