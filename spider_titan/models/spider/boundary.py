"""Where segments end: the predictor, the selection of hard boundaries, and the bias that holds their rate.

Letters: B rows, L bytes, D hidden. ``boundaries[l]`` means that byte l is the last of its segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider_titan.models.spider.config import SpiderConfig
from spider_titan.vocabulary import EOS_ID, PAD_ID


class Selection(NamedTuple):
    """Hard boundaries of a batch; all [B, L].

    Args:
        logits: fp32, the predictor's output plus its bias.
        probs: fp32, their sigmoid.
        selected: bool, the boundaries that were asked for.
        boundaries: bool, those of ``selected`` that found a slot.
        real: bool, not PAD.
        mandatory: bool, EOS, which always closes a segment.
    """

    logits: Tensor
    probs: Tensor
    selected: Tensor
    boundaries: Tensor
    real: Tensor
    mandatory: Tensor

    @property
    def free(self) -> Tensor:
        """Bytes whose boundary is the predictor's choice, bool [B, L]."""
        return self.real & ~self.mandatory


class BoundaryPredictor(nn.Module):
    """Norm and two-layer MLP, D -> D -> 1, in fp32 whatever the model computes in.

    ``bias`` moves by rule and not by gradient; ``rate_average`` is the running boundary rate the rule looks at.
    """

    bias: Tensor
    rate_average: Tensor

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.hidden = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)
        self.register_buffer("bias", torch.zeros((), dtype=torch.float32))
        self.register_buffer("rate_average", torch.zeros((), dtype=torch.float32))
        self.target_rate = config.boundary_rate
        self.decay = config.boundary_bias_decay
        self.gain = config.boundary_bias_gain

    def init_buffers(self) -> None:
        """Values before the first step."""
        self.bias.zero_()
        self.rate_average.fill_(self.target_rate)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D] in any dtype -> logits without the bias, fp32 [B, L]."""
        hidden = F.gelu(self.hidden(self.norm(x_BLD.float())))
        return F.linear(hidden, self.output.weight).squeeze(-1) + self.output.bias

    @torch.no_grad()
    def follow_quantile(self, quantile: Tensor) -> None:
        """Fixed phases: the bias follows minus the average of the logits' quantile, so 0.5 splits at the target rate.

        Args:
            quantile: fp32 scalar, the logit (without bias) above which the target share of the step's bytes lies.
        """
        self.bias.lerp_(-quantile.to(self.bias), 1.0 - self.decay)

    @torch.no_grad()
    def counter_drift(self, rate: Tensor, spread: Tensor) -> None:
        """Adaptive phases: the bias moves against the deviation of the average global rate from the target.

        The move is in units of the logits' spread: what changes the rate does not depend on their scale then, which the
        gradient of ``confidence`` makes grow.

        Args:
            rate: Scalar, share of the step's bytes that were selected.
            spread: Scalar, standard deviation of the step's logits; at least 1 is taken.
        """
        self.rate_average.lerp_(rate.to(self.rate_average), 1.0 - self.decay)
        unit = spread.to(self.bias).clamp_min(1.0)
        self.bias.add_(unit * self.gain * (self.target_rate - self.rate_average))


def select_boundaries(
    raw_logits: Tensor, bias: Tensor, ids: Tensor, *, mode: str, rate: float, capacity: int
) -> Selection:
    """Turns logits into hard boundaries.

    Args:
        raw_logits: fp32 [B, L], without the bias.
        bias: fp32 scalar.
        ids: int64 [B, L].
        mode: ``topk`` takes the floor(rate * bytes) largest of a row and so looks ahead; ``threshold`` takes p > 0.5.
        rate: Share of a row's bytes that ``topk`` selects, the mandatory ones included.
        capacity: Boundaries a row may hold; later ones are dropped.

    Raises:
        ValueError: For another mode.
    """
    logits = raw_logits + bias
    real, mandatory = ids != PAD_ID, ids == EOS_ID
    if mode == "topk":
        order = priority(raw_logits, real, mandatory).argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
        selected = rank < budget(real, rate)[:, None]
    elif mode == "threshold":
        selected = logits > 0
    else:
        raise ValueError(f"boundary mode '{mode}' is unknown; use 'topk' or 'threshold'")
    selected = (selected | mandatory) & real
    boundaries = selected & (selected.cumsum(-1) <= capacity)
    return Selection(logits, logits.sigmoid(), selected, boundaries, real, mandatory)


def priority(raw_logits: Tensor, real: Tensor, mandatory: Tensor) -> Tensor:
    """Order in which bytes become boundaries: EOS first, PAD last."""
    return raw_logits.detach().masked_fill(mandatory, torch.inf).masked_fill(~real, -torch.inf)


def budget(real: Tensor, rate: float) -> Tensor:
    """Boundaries of each row at ``rate``: floor(rate * real bytes), int64 [B]."""
    # The margin keeps an exact quotient, such as 33 bytes at 1 / 3.3, from falling below its integer.
    return (real.sum(-1).double() * rate + 1e-9).floor().long()


@torch.no_grad()
def rate_quantile(raw_logits: Tensor, selection: Selection, rate: float) -> tuple[Tensor, Tensor]:
    """The raw logit that would split each row at ``rate``, mandatory boundaries counted.

    Args:
        raw_logits: fp32 [B, L], without the bias.
        selection: Of the same bytes.
        rate: Target share of boundaries.

    Returns:
        (quantile, weight), fp32 [B]: weight is the row's number of real bytes, and 0 where the row has no free choice.
    """
    real = selection.real
    ordered = priority(raw_logits, real, selection.mandatory).sort(dim=-1, descending=True).values
    last_in = (budget(real, rate) - 1).clamp_min(0)
    first_out = (last_in + 1).clamp_max(raw_logits.shape[1] - 1)
    edge = ordered.gather(1, torch.stack((last_in, first_out), dim=1))
    usable = edge.isfinite().all(-1)
    return edge.mean(-1).where(usable, 0.0), real.sum(-1).float() * usable
