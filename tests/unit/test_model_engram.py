"""The n-gram memory: ids in big integers, frozen constants, gate, convolution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spider_titan.models.common.documents import document_numbers
from spider_titan.models.spider.engram import (
    KERNEL_SIZE,
    EngramGate,
    EngramTable,
    closing_ngrams,
    conv_mask,
    primes_above,
    signed_sqrt,
)
from spider_titan.spec import get_model_spec
from spider_titan.vocabulary import BOS_ID, PAD_ID, VOCAB_SIZE

from .reference.attention import rms_norm
from .reference.tiny import enliven, lively_spider, packed_rows, spider_config

# Models that are trained already depend on these: they may never change.
FROZEN_MULTIPLIERS = {
    0: [
        1585380222369009,
        2123624314663889,
        851441370222385,
        4421373311276187,
        3045752048416777,
        6124259784011263,
        591272645668043,
        2080406203449933,
    ],
    1: [
        4134910751812799,
        3170760444738017,
        5997679702640239,
        5695029716394325,
        7589877666670923,
        8051508971926833,
        5373588335813829,
        3197933046818927,
    ],
    4: [
        4958396497169021,
        1849359342242983,
        4339887173619799,
        1826847431018397,
        7666029754446753,
        7864920332939431,
        5036175043377473,
        8567926072962275,
    ],
}
FROZEN_DEBUG_PRIMES = {
    1: [[4153, 4157], [4159, 4177], [4201, 4211]],
    4: [[4289, 4297], [4327, 4337], [4339, 4349]],
}


def new_table(layer: int, **changes: object) -> EngramTable:
    table = EngramTable(spider_config(**changes), layer)
    table.init_buffers()
    return table


def naive_ngram(ids: list[int], closing: int, longest: int) -> list[int]:
    """The ids that end at ``closing``, newest first; PAD's id once the start of the document or row is passed."""
    ngram, at, inside = [], closing, True
    for _ in range(longest):
        ngram.append(ids[at] if inside else PAD_ID)
        inside = inside and ids[at] != BOS_ID and at > 0
        at -= 1
    return ngram


def naive_rows(ngram: list[int], layer: int, orders: tuple[int, ...], primes: list[list[int]]) -> list[int]:
    """Table rows in Python's integers, which do not overflow; the remainder of a C-like int64 would be the same."""
    rows, offset = [], 0
    for order, order_primes in zip(orders, primes, strict=True):
        mixed = 0
        for position in range(order):
            mixed ^= ngram[position] * FROZEN_MULTIPLIERS[layer][position]
        assert 0 <= mixed < 2**63
        for prime in order_primes:
            rows.append(offset + mixed % prime)
            offset += prime
    return rows


def test_ngrams_end_at_the_closing_byte_within_their_document() -> None:
    ids = packed_rows()
    documents = document_numbers(ids)
    closing = torch.arange(ids.shape[1]).expand_as(ids)
    filled = ids != PAD_ID
    ngrams = closing_ngrams(ids, documents, closing, filled, 8)
    for row, row_ids in enumerate(ids.tolist()):
        for at in range(len(row_ids)):
            expected = naive_ngram(row_ids, at, 8) if row_ids[at] != PAD_ID else [PAD_ID] * 8
            assert ngrams[row, at].tolist() == expected


def test_slots_without_a_segment_look_up_a_blank() -> None:
    ids = packed_rows()
    closing, filled = torch.zeros(4, 5, dtype=torch.int64), torch.zeros(4, 5, dtype=torch.bool)
    assert (closing_ngrams(ids, document_numbers(ids), closing, filled, 3) == PAD_ID).all()


@pytest.mark.parametrize("layer", [1, 4])
def test_rows_equal_big_integers(layer: int) -> None:
    table = new_table(layer, engram_orders=(3, 5, 8), engram_slots=4096, num_recurrent_layers=6, engram_layers=(1, 4))
    torch.manual_seed(layer)
    ngrams = torch.randint(0, VOCAB_SIZE, (2, 50, 8))
    ngrams[0, 0], ngrams[0, 1], ngrams[0, 2] = VOCAB_SIZE - 1, 0, PAD_ID
    rows = table.rows(ngrams)
    for index in range(2):
        for slot in range(50):
            expected = naive_rows(ngrams[index, slot].tolist(), layer, (3, 5, 8), FROZEN_DEBUG_PRIMES[layer])
            assert rows[index, slot].tolist() == expected
    assert rows.max() < table.embed.num_embeddings


def test_rows_of_text_in_the_whole_model() -> None:
    """What the model looks up for its own segments, with the reserved id before each document's start."""
    ids = packed_rows()
    model = lively_spider()
    seen: dict[str, Tensor] = {}
    for layer, table in model.engram.layers.items():
        table.embed.register_forward_pre_hook(lambda module, inputs, layer=layer: seen.update({layer: inputs[0]}))
    out = model(ids)
    for layer in ("0", "1"):
        primes = model.engram.layers[layer].primes.tolist()
        for row, row_ids in enumerate(ids.tolist()):
            ends = out.boundaries[row].nonzero().flatten().tolist()
            for slot, end in enumerate(ends, start=1):
                expected = naive_rows(naive_ngram(row_ids, end, 5), int(layer), (2, 5), primes)
                assert seen[layer][row, slot].tolist() == expected
            blank = naive_rows([PAD_ID] * 5, int(layer), (2, 5), primes)
            assert seen[layer][row, 0].tolist() == blank


@pytest.mark.parametrize("layer", FROZEN_MULTIPLIERS)
def test_multipliers_are_frozen(layer: int) -> None:
    table = new_table(layer, engram_orders=(3, 5, 8))
    assert table.multipliers.tolist() == FROZEN_MULTIPLIERS[layer]
    assert all(value % 2 == 1 and 0 < value * VOCAB_SIZE < 2**62 for value in FROZEN_MULTIPLIERS[layer])


@pytest.mark.parametrize("layer", FROZEN_DEBUG_PRIMES)
def test_primes_are_frozen(layer: int) -> None:
    model = get_model_spec("spider").build(get_model_spec("spider").flavors["debug"])
    table = model.engram.layers[str(layer)]
    assert table.primes.tolist() == FROZEN_DEBUG_PRIMES[layer]
    flat = table.primes.flatten().tolist()
    assert table.offsets.flatten().tolist() == [sum(flat[:index]) for index in range(len(flat))]
    assert table.embed.num_embeddings == sum(flat)


def test_primes_are_prime_and_distinct_over_layers_orders_and_heads() -> None:
    used = [prime for layer in range(6) for prime in new_table(layer, engram_orders=(3, 5, 8)).table_primes()]
    assert len(set(used)) == len(used) == 36
    assert all(prime > 64 and all(prime % divisor for divisor in range(2, prime)) for prime in used)


def test_primes_above() -> None:
    assert primes_above(0, 6) == [2, 3, 5, 7, 11, 13]
    assert primes_above(13, 2) == [17, 19]


def test_constants_do_not_depend_on_the_list_of_layers() -> None:
    spec = get_model_spec("spider")
    both = spec.build(spider_config(engram_layers=(0, 1)))
    only = spec.build(spider_config(engram_layers=(1,)))
    for name in ("multipliers", "primes", "offsets"):
        assert torch.equal(getattr(both.engram.layers["1"], name), getattr(only.engram.layers["1"], name))
    assert not torch.equal(both.engram.layers["0"].multipliers, both.engram.layers["1"].multipliers)
    assert torch.equal(both.engram.layers["1"].embed.weight, only.engram.layers["1"].embed.weight)


def test_constants_are_saved_with_the_model() -> None:
    model = lively_spider()
    saved = model.state_dict()
    for layer in ("0", "1"):
        for name in ("multipliers", "primes", "offsets"):
            assert saved[f"engram.layers.{layer}.{name}"].dtype == torch.int64
    assert {"boundary_predictor.bias", "boundary_predictor.rate_average"} <= set(saved)


def test_signed_sqrt_is_the_root_away_from_zero_and_smooth_at_it() -> None:
    x = torch.tensor([-400.0, -4.0, -1.0, 0.0, 1.0, 4.0, 400.0], requires_grad=True)
    values = signed_sqrt(x)
    torch.testing.assert_close(values, torch.tensor([-20.0, -2.0, -1.0, 0.0, 1.0, 2.0, 20.0]), rtol=1e-4, atol=0)
    values.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert 1.0 < float(x.grad[3]) < 100.0


def documents_of_slots() -> Tensor:
    return torch.tensor([[-2, 0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, -3, -3], [-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])


def test_gate_and_convolution_equal_a_loop() -> None:
    config = spider_config()
    gate = EngramGate(config)
    enliven(gate)
    documents = documents_of_slots()
    torch.manual_seed(0)
    y, key, value = torch.randn(3, 2, 14, config.hidden_size)
    actual = gate(y, (key, value), conv_mask(documents))

    weights = {name: parameter.detach().double() for name, parameter in gate.named_parameters()}
    for row in range(2):
        gated = []
        for slot in range(14):
            query = rms_norm(y[row, slot].double(), weights["query_norm.weight"], config.norm_eps)
            similarity = float(key[row, slot].double() @ query) / math.sqrt(config.hidden_size)
            root = similarity * (similarity**2 + 1e-4) ** -0.25
            gated.append(value[row, slot].double() / (1 + math.exp(-root)))
        for slot in range(14):
            expected = gated[slot].clone()
            for back in range(KERNEL_SIZE):
                if slot - back >= 0 and documents[row, slot - back] == documents[row, slot]:
                    normed = rms_norm(gated[slot - back], weights["value_norm.weight"], config.norm_eps)
                    expected += weights["conv.weight"][:, 0, KERNEL_SIZE - 1 - back] * normed
            torch.testing.assert_close(actual[row, slot].double(), expected, rtol=1e-4, atol=1e-5)


def test_gate_has_finite_gradients_where_memory_and_state_are_zero() -> None:
    config = spider_config()
    gate = EngramGate(config)
    enliven(gate)
    y, key, value = (torch.zeros(1, 6, config.hidden_size, requires_grad=True) for _ in range(3))
    gate(y, (key, value), conv_mask(torch.zeros(1, 6, dtype=torch.int64))).sum().backward()
    for tensor in (y, key, value, *gate.parameters()):
        assert torch.isfinite(tensor.grad).all()
    assert value.grad.abs().max() > 0


def test_the_memory_is_looked_up_once_however_many_loops_run() -> None:
    model = lively_spider()
    calls: list[int] = []
    model.engram.layers["0"].embed.register_forward_hook(lambda *_: calls.append(1))
    model(packed_rows(), num_loops=5)
    assert len(calls) == 1
