"""Windowed attention, YaRN and multi-head latent attention against plain references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from spider_titan.models.common.attention import (
    _flex_mask,
    attention_mask,
    chunk_layout,
    windowed_attention,
)
from spider_titan.models.common.blocks import DenseBlock
from spider_titan.models.common.documents import document_numbers
from spider_titan.models.common.rotary import apply_rotary, rotary_table, yarn_frequencies, yarn_softmax_factor
from spider_titan.vocabulary import BOS_ID, EOS_ID, PAD_ID

from .reference.attention import latent_attention, masked_softmax, rms_norm, rotate, visible_matrix, yarn_angles
from .reference.tiny import byte_transformer_config, enliven

# (L, W): one chunk and several, windows below, at and above the length, lengths that chunks do not divide.
SHAPES = [(1, 1), (1, 9), (2, 1), (17, 1), (17, 5), (17, 16), (17, 17), (17, 40), (64, 16), (256, 256), (256, 100)]
LONG_SHAPES = [(257, 1), (257, 2), (300, 64), (300, 65), (300, 66), (320, 299), (321, 321), (321, 400), (330, 320)]


def joined_documents(length: int) -> Tensor:
    """[2, L]: one document; several with a tail of -1."""
    torch.manual_seed(length)
    several = (torch.rand(length) < 0.06).long().cumsum(0)
    several[length - length // 5 :] = -1
    return torch.stack((torch.zeros(length, dtype=torch.int64), several))


@pytest.mark.parametrize(("length", "window"), SHAPES + LONG_SHAPES)
def test_a_query_sees_exactly_its_window_and_document(length: int, window: int) -> None:
    """Values are unit vectors, so the output is the attention matrix itself."""
    documents = joined_documents(length)
    q, k = torch.randn(2, 2, length, 1, length) * 0.1
    v = torch.eye(length).expand(2, length, length)[:, :, None]
    probs = windowed_attention(q, k, v, attention_mask(documents, window), 1.0)[:, :, 0]
    assert torch.equal(probs > 0, visible_matrix(window, documents))
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, length))


def random_qkv(length: int, *, value_dim: int = 8) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, length, 2, dim, requires_grad=True) for dim in (12, 12, value_dim)]


@pytest.mark.parametrize("value_dim", [4, 12, 20])
@pytest.mark.parametrize(("length", "window"), [(1, 1), (17, 5), (40, 64), (300, 1), (300, 65), (321, 321)])
def test_attention_equals_the_full_score_matrix(length: int, window: int, value_dim: int) -> None:
    documents = joined_documents(length)
    qkv = random_qkv(length, value_dim=value_dim)
    output_grad = torch.randn(2, length, 2, value_dim)
    out = windowed_attention(*qkv, attention_mask(documents, window), 0.7)
    grads = torch.autograd.grad((out * output_grad).sum(), qkv)

    exact = [x.detach().double().requires_grad_() for x in qkv]
    scores = torch.einsum("bqhk,bshk->bhqs", exact[0], exact[1]) * 0.7
    probs = masked_softmax(scores, visible_matrix(window, documents)[:, None])
    expected = torch.einsum("bhqs,bshv->bqhv", probs, exact[2])
    expected_grads = torch.autograd.grad((expected * output_grad).sum(), exact)

    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "window"), [(1, 1), (17, 5), (128, 16), (300, 65), (300, 299), (321, 400), (640, 200)]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_chunks_see(length: int, window: int) -> None:
    """The CUDA path's mask, run uncompiled; its kernel has a test of its own below."""
    documents = joined_documents(length)
    q, k, v = (x.detach() for x in random_qkv(length))
    expected = windowed_attention(q, k, v, attention_mask(documents, window), 0.7)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    flex = flex_attention(*heads_first, block_mask=_flex_mask(documents, window), scale=0.7).transpose(1, 2)
    torch.testing.assert_close(flex, expected, rtol=1e-4, atol=1e-5)


def test_flex_attention_skips_what_the_window_and_documents_rule_out() -> None:
    documents = torch.stack((torch.zeros(4096, dtype=torch.int64), torch.arange(4096) // 128))
    blocks = _flex_mask(documents, 256).kv_num_blocks
    assert int(blocks[0].max()) == 3
    assert int(blocks[1].max()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "window"), [(17, 5), (300, 65), (321, 400)])
def test_attention_on_cuda_equals_the_cpu(length: int, window: int) -> None:
    documents, qkv = joined_documents(length), random_qkv(length)
    output_grad = torch.randn(2, length, 2, 8)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.detach().to(device).requires_grad_() for x in qkv]
        out = windowed_attention(*inputs, attention_mask(documents.to(device), window), 0.7)
        grads = torch.autograd.grad((out * output_grad.to(device)).sum(), inputs)
        results.append([x.cpu() for x in (out, *grads)])
    for on_cpu, on_cuda in zip(*results, strict=True):
        torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window", [1, 16, 256, 4096, 8192])
@pytest.mark.parametrize("length", [1, 255, 256, 257, 4096, 65_536])
def test_the_work_is_linear_in_the_length(length: int, window: int) -> None:
    chunk, num_chunks, lookback = chunk_layout(length, window)
    assert chunk * num_chunks >= length > chunk * (num_chunks - 1)
    assert lookback * chunk >= min(window, length) - 1 or lookback == num_chunks - 1
    assert (lookback + 1) * chunk <= max(256, 2 * window + 64)


def test_document_numbers_count_starts_and_mark_padding() -> None:
    ids = torch.tensor([[97, EOS_ID, BOS_ID, 97, BOS_ID, EOS_ID, PAD_ID], [BOS_ID, 1, 2, 3, PAD_ID, PAD_ID, PAD_ID]])
    assert document_numbers(ids).tolist() == [[0, 0, 1, 1, 2, 2, -1], [1, 1, 1, 1, -1, -1, -1]]


@pytest.mark.parametrize(
    ("dim", "original", "factor"), [(4, 16, 32.0), (16, 512, 8.0), (64, 32768, 8.0), (16, 512, 1.0)]
)
def test_yarn_frequencies_are_the_papers(dim: int, original: int, factor: float) -> None:
    frequencies = yarn_frequencies(dim, theta=10000.0, factor=factor, original_length=original)
    expected = yarn_angles(dim, 10000.0, factor, original)
    torch.testing.assert_close(frequencies, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_yarn_ends() -> None:
    """Fast pairs keep their frequency, slow ones are interpolated by the factor, some lie between."""
    plain = torch.tensor([10000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    ratio = yarn_frequencies(64, theta=10000.0, factor=8.0, original_length=512) / plain
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 8)
    assert ((ratio > 0.13) & (ratio < 0.99)).any()


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 1.0), (1.0, 1.0), (8.0, 1.2079441541679836**2)])
def test_softmax_factor(factor: float, expected: float) -> None:
    assert yarn_softmax_factor(factor) == pytest.approx(expected, rel=1e-12)


def test_rotation_keeps_precision_at_the_end_of_the_longest_context() -> None:
    frequencies = yarn_frequencies(64, theta=10000.0, factor=8.0, original_length=32768)
    last = 262_143
    table = rotary_table(last + 1, frequencies, torch.device("cpu"))
    expected = [math.cos(last * angle) for angle in yarn_angles(64, 10000.0, 8.0, 32768)]
    torch.testing.assert_close(table.cos[last], torch.tensor(expected), rtol=0, atol=1e-6)


def test_rotation_multiplies_complex_pairs() -> None:
    frequencies = yarn_frequencies(8, theta=100.0, factor=4.0, original_length=16)
    x = torch.randn(1, 40, 3, 8, dtype=torch.float64)
    rotated = apply_rotary(x.float(), rotary_table(40, frequencies, x.device))
    for head in range(3):
        expected = rotate(x[0, :, head], yarn_angles(8, 100.0, 4.0, 16))
        torch.testing.assert_close(rotated[0, :, head].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "window"), [(50, 16), (50, 64), (50, 1), (300, 90)])
def test_a_dense_block_equals_the_plain_one(length: int, window: int) -> None:
    """At positions far beyond the original 16, in a window, over documents."""
    config = byte_transformer_config()
    block = DenseBlock(config.attention, config.intermediate_size)
    enliven(block)
    documents = joined_documents(length)[1:]
    x = torch.randn(1, length, config.hidden_size)
    frequencies = yarn_frequencies(4, theta=10000.0, factor=32.0, original_length=16)
    actual = block(x, rotary_table(length, frequencies, x.device), attention_mask(documents, window))[0]

    row = x[0].double()
    angles = yarn_angles(4, 10000.0, 32.0, 16)
    normed = rms_norm(row, block.attention_norm.weight, 1e-6)
    row = row + latent_attention(block.attention, normed, angles, 32.0, window, documents[0].tolist())
    normed = rms_norm(row, block.mlp_norm.weight, 1e-6)
    gate, up, down = (
        linear.weight.double() for linear in (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj)
    )
    gated = normed @ gate.T
    row = row + (gated / (1 + (-gated).exp()) * (normed @ up.T)) @ down.T
    torch.testing.assert_close(actual.double(), row, rtol=1e-4, atol=1e-4)
