"""What torch.compile leaves as it is: threads and process groups cannot be traced."""

from __future__ import annotations

# torch's own optimizers use it. The public `torch.compiler.disable` does the same, and imports the compiler right away,
# which would take seconds whenever this package is imported.
from torch._compile import _disable_dynamo as uncompiled

__all__ = ["uncompiled"]
