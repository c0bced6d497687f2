"""Spider's losses.

Each is computed per row and weighted by the row's share of the step's targets, so that it does not depend on how the
global batch is cut into micro-batches and ranks.

Letters: B rows, L bytes, S slots, E experts; R loops * layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from spider_titan.models.common.losses import as_sums, language_model_metrics, language_model_sums
from spider_titan.models.spider.boundary import Selection, rate_quantile
from spider_titan.models.spider.config import SpiderConfig
from spider_titan.models.spider.model import Spider, SpiderOutput
from spider_titan.models.spider.moe import RouterStats
from spider_titan.spec import Batch, LossTerms, StepContext
from spider_titan.vocabulary import PAD_ID

PREDICTOR_GROUP = "boundary_predictor"


def spider_loss(model: Spider, batch: Batch, context: StepContext) -> LossTerms:
    """Forward and all loss terms of one micro-batch: LM + router + boundary (+ z-loss, ponder)."""
    config = model.config
    frozen = PREDICTOR_GROUP in context.frozen_groups
    out = model(
        batch.input_ids,
        context.boundary_mode,
        max_boundary_rate=context.max_boundary_rate,
        num_loops=context.num_loops,
        freeze_boundaries=frozen,
    )
    lm = language_model_sums(out.logits, batch.targets)
    rows = row_terms(out, config, context, frozen=frozen)
    weight_B = (batch.targets != PAD_ID).sum(-1).float()
    terms = {name: (value * weight_B).sum() for name, value in rows.items()}
    weights = term_weights(config)
    objective = lm["lm_nats"] + sum(weights[name] * value for name, value in terms.items())
    sums = as_sums({**lm, "objective": objective, **terms, **statistics(out, batch, config)})
    return LossTerms(total=objective / context.num_targets, sums=sums, boundaries=out.boundaries)


def term_weights(config: SpiderConfig) -> dict[str, float]:
    """Weight of each row term in the total."""
    return {
        "router_aux": config.router_aux_weight,
        "router_z": config.router_z_weight,
        "boundary": config.boundary_weight,
        "ponder": config.act_ponder_weight,
    }


def row_terms(out: SpiderOutput, config: SpiderConfig, context: StepContext, *, frozen: bool) -> dict[str, Tensor]:
    """The auxiliary terms of each row, fp32 [B]."""
    segments_B = out.filled.sum(-1)
    terms = {
        "router_aux": load_balance(out.router, segments_B, config.experts_per_token),
        "router_z": out.router.z_B.mean(0) / segments_B.clamp_min(1),
        "ponder": (out.ponder * out.filled).sum(-1) / segments_B.clamp_min(1),
    }
    if not frozen:
        terms["boundary"] = boundary_loss(out.selection, config, context.boundary_phase)
    return terms


def load_balance(router: RouterStats, segments_B: Tensor, top_k: int) -> Tensor:
    """``E * sum_e f_e P_e``, averaged over layers and loops; 1 where perfectly even (Fedus et al. 2021, eq. 4-6).

    Args:
        router: Statistics with leading dim R.
        segments_B: Segments of each row.
        top_k: Experts a segment.

    Returns:
        fp32 [B]; 0 for a row without segments.
    """
    num_experts = router.load_BE.shape[-1]
    segments = segments_B.clamp_min(1)[:, None]
    share = router.load_BE / (segments * top_k)
    return num_experts * (share * router.probs_BE / segments).sum(-1).mean(0)


def boundary_loss(selection: Selection, config: SpiderConfig, phase: str) -> Tensor:
    """The predictor's own loss of each row, fp32 [B].

    Fixed phases: mean BCE over free bytes plus the binomial term. Adaptive phases: the binomial term or the hinge.
    """
    prior = config.boundary_rate
    bytes_B = selection.real.sum(-1)
    count_B = straight_through_count(selection)
    if phase == "adaptive" and config.boundary_adaptive_loss == "hinge":
        return config.boundary_binomial_weight * hinge(count_B, bytes_B, prior, config.boundary_hinge_width)
    prior_term = config.boundary_binomial_weight * binomial_nll(count_B, bytes_B, prior)
    if phase == "adaptive":
        return prior_term
    if config.boundary_fixed_target == "selection":
        target = selection.selected.float()
    else:
        target = torch.full_like(selection.probs, prior)
    bce = F.binary_cross_entropy_with_logits(selection.logits, target, reduction="none")
    free = selection.free
    return (bce * free).sum(-1) / free.sum(-1).clamp_min(1) + prior_term


def straight_through_count(selection: Selection) -> Tensor:
    """Selected boundaries of each row, fp32 [B]: exact in value, with the gradient of the free probabilities."""
    soft = (selection.probs * selection.free).sum(-1)
    return selection.selected.sum(-1).float() + (soft - soft.detach())


def binomial_nll(count_B: Tensor, bytes_B: Tensor, prior: float) -> Tensor:
    """``-log Binomial(bytes, prior)(count) / bytes`` (Nawrot et al. 2023), fp32 [B]; 0 for a row without bytes.

    Computed in float64: the terms are of the size of ``bytes * log(bytes)`` and cancel.
    """
    n, k = bytes_B.double(), count_B.double()
    log_choose = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    # Filled on the device: numbers that are copied there would wait for it.
    log_prior, log_rest = n.new_full((), prior).log(), n.new_full((), 1.0 - prior).log()
    nll = -(log_choose + k * log_prior + (n - k) * log_rest)
    return (nll / n.clamp_min(1)).float()


def hinge(count_B: Tensor, bytes_B: Tensor, prior: float, width: float) -> Tensor:
    """Distance of the rate from [prior - width * std, prior], fp32 [B] (after FLEXITOKENS, arXiv 2507.12720).

    std is that of a binomial rate over the row's bytes.
    """
    n = bytes_B.clamp_min(1).float()
    rate = count_B / n
    std = (prior * (1.0 - prior) / n).sqrt()
    return F.relu(rate - prior) + F.relu(prior - width * std - rate)


def statistics(out: SpiderOutput, batch: Batch, config: SpiderConfig) -> dict[str, Tensor]:
    """Sums that metrics and the rules of ``after_step`` need."""
    selection = out.selection
    quantile, weight = rate_quantile(out.raw_boundary_logits, selection, config.boundary_rate)
    logits = out.raw_boundary_logits.detach().double() * selection.real
    layers = config.num_recurrent_layers
    return {
        "num_bytes": selection.real.sum(),
        "num_selected": selection.selected.sum(),
        "num_boundaries": selection.boundaries.sum(),
        "num_segments": out.filled.sum(),
        "boundary_logits": logits.sum(),
        "boundary_logit_squares": logits.square().sum(),
        "loops": (out.ponder * out.filled).sum(),
        "quantile": (quantile * weight).sum(),
        "quantile_weight": weight.sum(),
        "expert_load": out.router.load_BE.sum(1).unflatten(0, (-1, layers)),
        "expert_probs": out.router.probs_BE.detach().sum(1).unflatten(0, (-1, layers)),
        "hidden_norm": out.loops.hidden_norm_T,
        "halting": out.loops.halting_T,
        "engram_norm": out.loops.engram_norm_TG,
        "loop_grad_squares": out.loops.grad_squares_T,
    }


def spider_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Ratios of summed ``LossTerms.sums``: losses in nats, rates, and bytes a segment."""

    def ratio(numerator: str, denominator: str) -> float:
        return float(totals[numerator]) / max(float(totals[denominator]), 1.0)

    metrics = language_model_metrics(totals)
    metrics["loss"] = ratio("objective", "num_targets")
    for name, label in (
        ("router_aux", "router_aux_loss"),
        ("router_z", "router_z_loss"),
        ("boundary", "boundary_loss"),
        ("ponder", "ponder_loss"),
    ):
        if name in totals:
            metrics[label] = ratio(name, "num_targets")
    metrics["boundary_rate"] = ratio("num_boundaries", "num_bytes")
    metrics["boundary_dropped_share"] = 1.0 - float(totals["num_boundaries"]) / max(float(totals["num_selected"]), 1.0)
    metrics["boundary_logit_spread"] = float(logit_spread(totals))
    metrics["bytes_per_segment"] = float(totals["num_bytes"]) / max(float(totals["num_segments"]), 1.0)
    metrics["expected_loops"] = ratio("loops", "num_segments")
    return {**metrics, **loop_metrics(totals), **expert_metrics(totals["expert_load"])}


def logit_spread(totals: Mapping[str, Tensor]) -> Tensor:
    """Standard deviation of the boundary logits over the step's bytes, float64 scalar."""
    num_bytes = totals["num_bytes"].clamp_min(1)
    mean = totals["boundary_logits"] / num_bytes
    return (totals["boundary_logit_squares"] / num_bytes - mean.square()).clamp_min(0.0).sqrt()


def loop_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """NAME/T of the loops, counted from 1, and ``engram_norm/G`` of the layers with a memory.

    Means over segments, but for the gradient's norm, which is that of all segments together.
    """
    segments = totals["num_segments"].clamp_min(1)
    # A layer's router has collapsed if it sends all segments to the same few experts; one such layer is enough.
    entropy_T = entropy_share(totals["expert_probs"]).amin(1)
    by_loop = {
        "hidden_norm": totals["hidden_norm"] / segments,
        "halting_share": totals["halting"] / segments,
        "routing_entropy": entropy_T,
        "loop_grad_norm": totals["loop_grad_squares"].sqrt(),
    }
    metrics = {f"{name}/{t}": value for name, of in by_loop.items() for t, value in enumerate(of.tolist(), 1)}
    engram = (totals["engram_norm"] / segments).mean(0)
    return {**metrics, **{f"engram_norm/{number}": value for number, value in enumerate(engram.tolist(), 1)}}


def entropy_share(probs: Tensor) -> Tensor:
    """Entropy over the last dimension, as a share of the highest that is possible; 1 for one expert alone.

    Args:
        probs: Not negative, [..., E]; scaled to sum to 1.
    """
    share = probs / probs.sum(-1, keepdim=True)
    num_experts = probs.shape[-1]
    return torch.special.entr(share).sum(-1) / math.log(num_experts) if num_experts > 1 else share.sum(-1)


def expert_metrics(load: Tensor) -> dict[str, float]:
    """Highest and lowest load of an expert of any layer in each loop, counted from 1; 1 is an even load.

    Args:
        load: Assignments, [loops, layers, E].
    """
    relative = load / load.mean(-1, keepdim=True).clamp_min(torch.finfo(load.dtype).tiny)
    extremes = {"expert_load_max": relative.amax((1, 2)), "expert_load_min": relative.amin((1, 2))}
    return {f"{name}/{t}": value for name, of in extremes.items() for t, value in enumerate(of.tolist(), 1)}


@torch.no_grad()
def spider_after_step(model: Spider, totals: Mapping[str, Tensor], context: StepContext) -> None:
    """Moves the boundary bias, and the routers' balance biases if they are on, by the step's global statistics."""
    predictor = model.boundary_predictor
    if context.boundary_phase == "adaptive":
        rate = totals["num_selected"] / totals["num_bytes"].clamp_min(1)
        predictor.counter_drift(rate, logit_spread(totals))
    else:
        # Without a usable row the bias stays; chosen without a branch, which would wait for the device.
        weight = totals["quantile_weight"]
        predictor.follow_quantile((totals["quantile"] / weight).where(weight > 0, -predictor.bias.double()))
    if model.config.router_bias_rate > 0:
        for router, load_E in zip(model.core.routers(), totals["expert_load"].sum(0), strict=True):
            router.balance(load_E, model.config.router_bias_rate)
