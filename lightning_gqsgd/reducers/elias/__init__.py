"""Elias omega codes for the messages of `reducers.gather`: streams, tables, a writer and a reader."""
