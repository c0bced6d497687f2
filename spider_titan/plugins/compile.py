"""torch.compile: every application of a block is a whole graph of its own, with static shapes.

What is compiled is a module's forward. So its hooks, such as the one that gathers a sharded block's weights, run as
plain Python around the graph, and so do the loss and everything between blocks. Blocks of a kind share what was
compiled for the first of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spider_titan.spec import Batch, ModelSpec, StepContext

if TYPE_CHECKING:
    from spider_titan.curriculum import PhaseConfig
    from spider_titan.plugins.context import PluginContext

logger = logging.getLogger(__name__)


class CompileError(ValueError):
    """A block cannot be compiled as one graph."""


class CompiledForward(partial[Any]):
    """A module's compiled forward, bound to it so that a copy of the module gets one of its own."""


@dataclass(frozen=True)
class CompileConfig:
    """The section ``[compile]``."""

    enable: bool = False
    """Compile blocks with torch.compile. The first steps' kernels are built before training starts, in minutes."""
    components: list[str] = field(default_factory=list)
    """Top-level names of the blocks to compile, such as prelude or core; empty: all."""
    backend: str = "inductor"
    """Backend of torch.compile."""


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Compiles the applications of the chosen blocks in place; the work itself is done when they are first called.

    Raises:
        ValueError: If a component or the backend is unknown.
    """
    config = context.compile
    if not config.enable:
        return model
    _check_backend(config.backend)
    # A backward that cannot be compiled then fails while its block is being called, which is how the block is known.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    names = [fqn for block in spec.blocks(model) for fqn in block.applications]
    chosen = _choose(names, config.components)
    for fqn in chosen:
        module = model.get_submodule(fqn)
        forward = torch.compile(type(module).forward, fullgraph=True, dynamic=False, backend=config.backend)
        module.forward = CompiledForward(_naming_failures(forward, fqn), module)
    if not chosen:
        logger.warning("compile: nothing to compile, as model '%s' names no blocks", spec.name)
        return model
    logger.info("compile: %d of %d modules, each as one graph, by %s", len(chosen), len(names), config.backend)
    return model


def compiled_modules(model: nn.Module) -> list[str]:
    """FQNs of the modules that are compiled."""
    return [fqn for fqn, module in model.named_modules() if isinstance(module.forward, CompiledForward)]


@dataclass(frozen=True)
class WarmUp:
    """What a run will call its model with.

    Args:
        phases: All of the run's.
        batch: Of the run's shape, strides and device; its content does not matter.
        validates: Whether the run validates.
        num_loops: The most loops of a training step, for models that loop: what fewer loops need is among theirs.
    """

    phases: Sequence[PhaseConfig]
    batch: Batch
    validates: bool = True
    num_loops: int | None = None

    def training_contexts(self, spec: ModelSpec, model: nn.Module) -> list[StepContext]:
        """The distinct contexts of training steps: each phase, with and without the groups that start late."""
        late = frozenset(group.name for group in spec.param_groups(model) if group.starts_after_warmup)
        contexts = (
            StepContext(
                num_targets=max(1, self.batch.num_targets),
                boundary_mode=phase.boundary_mode,
                boundary_phase=phase.boundary,
                max_boundary_rate=phase.boundary_capacity,
                frozen_groups=frozen,
                num_loops=self.num_loops,
            )
            for phase in self.phases
            for frozen in (late, frozenset())
        )
        return list(dict.fromkeys(contexts))

    def validation_contexts(self) -> list[StepContext]:
        """The distinct contexts of validations."""
        capacities = dict.fromkeys(phase.boundary_capacity for phase in self.phases) if self.validates else ()
        return [StepContext(num_targets=1, max_boundary_rate=capacity) for capacity in capacities]


def warm_up(model: nn.Module, spec: ModelSpec, plan: WarmUp) -> None:
    """Compiles all that a run needs, by a forward and backward of every kind of step before the first one.

    Weights, buffers and random numbers are left as they were, and gradients are dropped. All ranks must call it. Does
    nothing to a model without compiled blocks.

    Raises:
        CompileError: If a block cannot be compiled.
    """
    num_compiled = len(compiled_modules(model))
    if not num_compiled:
        return
    training, validation = plan.training_contexts(spec, model), plan.validation_contexts()
    # A part of a looped block may be called with and without gradients in one step.
    _allow_variants(num_compiled * (2 * len(training) + len(validation)))
    begin = time.perf_counter()
    with _untouched(model, plan.batch.input_ids.device):
        # The steps come last: a backward leaves sharded weights as the optimizer wants them, a forward does not.
        model.eval()
        with torch.no_grad():
            for context in validation:
                spec.loss(model, plan.batch, context)
        model.train()
        for context in training:
            spec.loss(model, plan.batch, context).total.backward()
            model.zero_grad()
    logger.info(
        "compile: ready for %d kinds of steps and %d of validations in %.0f s",
        len(training),
        len(validation),
        time.perf_counter() - begin,
    )


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts buffers, training mode and random numbers back at the end."""
    was_training = model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    model.train(was_training)


def _choose(names: Sequence[str], components: Sequence[str]) -> list[str]:
    known = list(dict.fromkeys(name.split(".")[0] for name in names))
    for component in components:
        if component not in known:
            raise ValueError(f"compile.components: '{component}' is no component of the model; it has {known}")
    return [name for name in names if not components or name.split(".")[0] in components]


def _check_backend(backend: str) -> None:
    known = torch._dynamo.list_backends(None)
    if backend not in known:
        raise ValueError(f"compile.backend = '{backend}' is unknown; torch has {', '.join(known)}")


def _naming_failures(compiled: Callable[..., Any], fqn: str) -> Callable[..., Any]:
    """``compiled``, whose failures to compile name the module: they come with its first call, deep in a forward."""
    failures = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except failures as error:
            # A backend's failure is within torch's own.
            reason = getattr(error, "inner_exception", error)
            summary = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
            raise CompileError(
                f"'{fqn}' cannot be compiled as one graph: {summary}; leave '{fqn.split('.')[0]}' out of "
                "compile.components, or set compile.enable = false"
            ) from error

    return call


def _allow_variants(count: int) -> None:
    """Lets torch keep ``count`` compiled versions of a function; blocks of all kinds may share one."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
