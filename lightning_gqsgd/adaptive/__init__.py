"""The choice of bits during a training: by the length of steps (``auto``), by the noise of gradients (``bits="auto"``),
or by both.

`trials` decides from the lengths of steps, which `clock` measures, and `noise` from sums, which `sampling` measures.
`steering` joins them with the hook.
"""
