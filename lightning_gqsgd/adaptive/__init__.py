"""Which number of bits makes the steps of a training shortest: tries, decisions, and a watch over the length of steps.

`trials` decides from the lengths of steps alone. `clock` measures them. `steering` joins the two with the hook.
"""
