"""Settings that have to be made before anything is imported."""

import os

import torch

# Without a GPU, Triton's kernels run in its interpreter; it decides when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
