"""Amounts of bytes and of parameters as text, in which small ones do not become 0."""

from __future__ import annotations


def megabytes_in_words(value: float) -> str:
    """10^6 bytes with one digit after the point, or with two digits below 1: ``1,234.5``, ``0.041``."""
    return f"{value:,.1f}" if value >= 0.95 or value == 0 else f"{value:.2g}"


def parameters_in_words(count: int) -> str:
    """A number of parameters: ``11.17 M parameters``, and in full below 10,000."""
    return f"{count / 1e6:,.2f} M parameters" if count >= 10_000 else f"{count:,} parameters"
