"""Plain values that a user asks for: fields, memories, bits by name, decisions.

Everything here is a value without objects of other parts. `config` finds out whether it can work. Nothing here imports
torch.
"""
