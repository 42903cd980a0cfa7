"""``python -m lightning_gqsgd.cli``."""

from lightning_gqsgd.cli.app import main

main()
