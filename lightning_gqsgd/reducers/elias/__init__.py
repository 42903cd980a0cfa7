"""Elias omega codes of whole messages, which `reducers.gather` sends: code words, tables, a writer and a reader."""
