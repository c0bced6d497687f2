"""Activation memory of a rank, without computing anything: a step is run on the meta device and its tensors counted.

Tensors there have sizes and no content, so forward and backward call every operator, and what each result would take is
known. What is alive is added up as operators make tensors and as these are dropped, recomputation included; the most
that it comes to is the answer.

    peak = max over the operators of a forward and backward of the bytes of the tensors that were made and still live

Not in it: weights and gradients, workspaces inside of kernels, and what an allocator loses to fragmentation. Float8
linears count as the bf16 ones that they take the place of, and the attention kernel as one that keeps its inputs, its
result and a number a query. A compiler fuses operators, so with compile the truth is lower.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spider_titan.plugins import PluginContext, activation_checkpoint
from spider_titan.spec import Batch, ModelSpec, StepContext


class LiveMemory(TorchDispatchMode):
    """Adds up the storages of the tensors that operators make, for as long as they live.

    ``peak`` is the most bytes that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: set[int] = set()

    def ignore(self, model: nn.Module) -> None:
        """Leaves the model's own tensors, and their gradients, out."""
        for tensor in (*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())):
            if tensor is not None:
                self._remember(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._remember(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, size)

    def _remember(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._known.discard, storage._cdata)

    def _release(self, size: int) -> None:
        self.live -= size


def estimate_activations(
    spec: ModelSpec, model_config: Any, context: PluginContext, *, rows: int, seq_len: int, max_boundary_rate: float
) -> int:
    """Bytes that a forward and backward of one micro-batch hold at most.

    Args:
        spec: The model's spec.
        model_config: Its hyper-parameters.
        context: Its precision and activation checkpointing count; its mesh does not.
        rows: Of the micro-batch.
        seq_len: Bytes a row.
        max_boundary_rate: Slots for segments, as a share of the bytes.
    """
    model = in_compute_dtype(spec.build(model_config, device="meta"), spec, context.precision.compute_dtype).train()
    model = activation_checkpoint.apply(model, spec, context)
    ids = torch.zeros(rows, seq_len, dtype=torch.int64, device="meta")
    step = StepContext(
        num_targets=1,
        boundary_phase="fixed",
        max_boundary_rate=max_boundary_rate,
        num_loops=spec.max_loops(model_config) if spec.max_loops else None,
    )
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    memory = LiveMemory()
    memory.ignore(model)
    with memory:
        spec.loss(model, Batch(ids, ids), step).total.backward()
    return memory.peak


def in_compute_dtype(model: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """Casts parameters as fully_shard gathers them: all in ``dtype``, but for the blocks that compute in fp32."""
    exempt = {
        id(parameter)
        for block in spec.blocks(model)
        if block.compute_dtype == "float32"
        for parameter in model.get_submodule(block.fqn).parameters()
    }
    for parameter in model.parameters():
        if id(parameter) not in exempt:
            parameter.data = parameter.data.to(dtype)
    return model
