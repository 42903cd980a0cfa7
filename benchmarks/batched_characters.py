"""The problem of `virtual_characters` for a GPU: all workers in one pass, in bf16, with the text on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.virtual_characters import LENGTH, VirtualCharacters
from workloads.characters import windows


class BatchedCharacters(VirtualCharacters):
    """`VirtualCharacters` on a device; start, batches and validation text are those of that class.

    Matrices are multiplied in bf16, and parameters and gradients stay in fp32.
    """

    def __init__(self, device: torch.device, seed: int, layers: int, width: int, batch: int) -> None:
        super().__init__(seed, layers, width, batch)
        self._device = device
        self.network.to(device)
        self._train = self._train.to(device)
        inputs, targets = self._validation
        self._validation = inputs.to(device), targets.to(device)
        self._gradients = vmap(grad(self._loss), randomness="same")  # there is no dropout

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """Returns each worker's gradient; see `VirtualCharacters.gradients`."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        inputs, targets = windows(self._train, workers * self._batch, LENGTH, generator)
        shape = (workers, self._batch, LENGTH)
        points = x.detach().expand(workers, -1)
        with self._in_bf16(), sdpa_kernel(SDPBackend.MATH):  # the only one that takes a batch of batches
            rows: Tensor = self._gradients(points, inputs.reshape(shape), targets.reshape(shape))
        # Clipped by each worker, as in training; the host does not wait for the norms.
        return rows * rows.norm(dim=1, keepdim=True).reciprocal().clamp(max=1.0)

    @torch.no_grad()
    def loss(self, x: Tensor) -> float:
        """Returns the loss on the validation text, in nats per character."""
        with self._in_bf16():
            return float(self._loss(x, *self._validation))

    def _in_bf16(self) -> torch.autocast:
        # Without a cache, because parameters are other tensors in each call.
        return torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False)
