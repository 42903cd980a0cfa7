"""Plain values of a configuration: fields, memories, bits by name, decisions.

Nothing here holds objects of other parts of the package, and nothing here imports torch. `config` checks whether the
values can work.
"""
