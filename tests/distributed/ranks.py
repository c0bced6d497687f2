"""Starting several ranks on this machine, and what they have in common."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.models.common.init import clean_fqn
from spider_titan.plugins import PluginContext, apply_plugins
from spider_titan.plugins.fsdp import materialize
from spider_titan.spec import Batch, ModelSpec

TINY_SPIDER: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "num_recurrent_layers": 2,
    "engram_layers": (1,),
    "num_experts": 8,
    "expert_rank": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "engram_slots": 64,
    "engram_head_dim": 4,
}


def spider_toml() -> str:
    """``TINY_SPIDER`` as the ``[model]`` of a file; what follows it goes on in that section."""
    lines = (f"{key} = {list(value) if isinstance(value, tuple) else value}" for key, value in TINY_SPIDER.items())
    return "\n".join(("[model]", 'name = "spider"', *lines, ""))


def spawn(world_size: int, function: Callable[..., None], *args: Any) -> None:
    """Runs ``function(rank, *args)`` on every rank, a thread each."""
    torch.multiprocessing.spawn(_run, args=(world_size, free_port(), function, args), nprocs=world_size)


def _run(rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(rank, *args)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def join(**degrees: Any) -> World:
    """The world of a spawned rank."""
    return join_world(ParallelismConfig(**degrees), CommConfig(init_timeout_seconds=60))


def build_sharded(spec: ModelSpec, config: Any, world: World, seed: int = 3, **sections: Any) -> nn.Module:
    """A model as the trainer builds it."""
    context = PluginContext(world.mesh, **sections)
    model = apply_plugins(spec.build(config, device="meta"), spec, context)
    materialize(model, context, world.device)
    spec.init_weights(model, seed)
    return model


def full(value: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; on all ranks at once."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers, by their clean names."""
    return {clean_fqn(name): full(value).detach().clone() for name, value in model.state_dict().items()}


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients, by their clean names."""
    named = ((clean_fqn(name), parameter.grad) for name, parameter in model.named_parameters())
    return {name: full(grad).detach().clone() for name, grad in named if grad is not None}


def rows_of(batch: Batch, rank: int, world_size: int) -> Batch:
    """The rows of one rank, contiguous."""
    share = batch.input_ids.shape[0] // world_size
    rows = slice(rank * share, (rank + 1) * share)
    return Batch(batch.input_ids[rows], batch.targets[rows])


def random_batch(rows: int = 4, length: int = 40) -> Batch:
    """Rows of random bytes, the second with a joint of two documents."""
    ids = torch.randint(0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    ids[1, 10:12] = torch.tensor([258, 257])
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def saved(folder: str, rank: int) -> Any:
    """What rank ``rank`` left in ``folder``."""
    return torch.load(Path(folder) / f"{rank}.pt", weights_only=True)


class CountCollectives(TorchDispatchMode):
    """Counts collectives by kind, and the bytes that all-gathers put out."""

    KINDS: ClassVar = {
        "allgather": "all_gathers",
        "all_gather": "all_gathers",
        "reduce_scatter": "reduce_scatters",
        "allreduce": "all_reduces",
        "all_reduce": "all_reduces",
    }

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.gathered_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            kind = next((kind for part, kind in self.KINDS.items() if part in name), name)
            self.calls[kind] += 1
            if kind == "all_gathers":
                tensor = args[0] if isinstance(args[0], Tensor) else args[0][0]
                self.gathered_bytes += tensor.numel() * tensor.element_size()
        return out
