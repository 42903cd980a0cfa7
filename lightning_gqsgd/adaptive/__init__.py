"""`auto`: finds the number of bits with the shortest steps by trials, and watches the length of steps afterwards.

`trials` decides from the lengths of steps alone. `clock` measures them. `steering` joins the two with the hook.
"""
