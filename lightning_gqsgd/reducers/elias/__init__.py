"""Elias omega codes for the messages of `reducers.gather`: code words, tables, a writer and a reader."""
