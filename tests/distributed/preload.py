"""What every rank would import and compile: done once, in the server that ranks are forked from."""

import gc
import sys

import accelerate  # noqa: F401
import hypothesis  # noqa: F401
import lightning.pytorch  # noqa: F401
import psutil  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # DistributedDataParallel imports it, which takes seconds
import torch._dynamo.backends.common  # torch.compile imports it, with 400 other modules
import torch.distributed.fsdp
from transformers import Trainer  # noqa: F401

import lightning_gqsgd.ddp.functional
import lightning_gqsgd.local_steps.merges.averages
import lightning_gqsgd.research.optim
import lightning_gqsgd.research.simulation  # noqa: F401
import tests.distributed.changed_models
import tests.distributed.local_models  # noqa: F401
from lightning_gqsgd.adaptive.prediction import Measured, predicted_steps
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.version import digest_of_sources
from lightning_gqsgd.wire.compiling import compile_kernels

# The environment may switch byte code off (see tests/conftest.py). Then each rank would compile its test's module anew.
sys.dont_write_bytecode = False

for _fields in ({"reducer": "sum"}, {"reducer": "two_shot"}, {"reducer": "gather"}, {"bits": 2, "reducer": "two_shot"}):
    compile_kernels(GQSGDConfig(**_fields), torch.float32, torch.device("cpu"), 2)

# Ranks tell each other which build of the package they run, for which each of them would read all sources.
digest_of_sources()

# The first operation on torch's device "meta" imports much of torch.
_candidates = {bits: resolve(config, 2) for bits, config in GQSGDConfig(auto=True).candidates().items()}
predicted_steps(_candidates, 2, {32: Measured(step_s=1.0, exposed_s=0.5, backward_s=0.1)})

# A collection of garbage looks at all objects, and writes to their pages, which each fork then has to copy. For the
# 600,000 objects of these modules, none of which is ever garbage, that takes a rank 0.3 seconds each time.
gc.collect()
gc.freeze()
