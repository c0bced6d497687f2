"""Parameter groups, their optimizers, learning rates and clipping: the one place that owns them."""

from spider_titan.optim.config import LRSchedulerConfig, OptimizerConfig
from spider_titan.optim.grouped import GroupedAdamW, check_groups
from spider_titan.optim.schedule import lr_factor

__all__ = ["GroupedAdamW", "LRSchedulerConfig", "OptimizerConfig", "check_groups", "lr_factor"]
