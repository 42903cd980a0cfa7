"""The command line, ``gqsgd``."""
