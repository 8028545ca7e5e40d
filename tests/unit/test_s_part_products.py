"""Products with packed weights: the same values as with the weights themselves, and as many rows as asked for."""

from __future__ import annotations

import pytest
import torch

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part import products
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.panel_weights import PanelWeight
from fastdecode_hpc.s_part.products import are_row_wise, linear, pack, pack_part, pack_tensor, unpacked
from fastdecode_hpc.s_part.row_tiles import RowTiles
from fastdecode_hpc.s_part.weights import dummy_weights
from fastdecode_hpc.setup import weights_on_host

CPU = torch.device("cpu")
MODEL = ModelConfig(100, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_context_len=64)


def pack_weights(weights):
    for part in (weights, *weights.layers):
        pack_part(part)


def is_plain(weight) -> bool:
    return isinstance(weight, torch.Tensor) and not weight.is_mkldnn


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pack", [pack, pack_tensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (100, 64), (65, 33), (960, 576), (16, 2048)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_weight_multiplies_as_the_weight_does(pack, dtype, num_out, num_in, has_bias):
    weight = random(num_out, num_in).to(dtype)
    bias = random(num_out, seed=1).to(dtype) if has_bias else None
    packed = pack(weight)
    assert torch.equal(unpacked(packed), weight)
    assert (packed.shape, packed.dtype) == (weight.shape, weight.dtype)
    for num_rows in (0, 1, 2, 7, 64, 300):
        x = random(num_rows, num_in, seed=2).to(dtype)
        expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        out = linear(x, packed, bias)
        assert out.dtype == dtype
        bound = (x.double().abs() @ weight.double().abs().T + 1) * torch.finfo(dtype).eps
        assert bool(((out.double() - expected).abs() <= bound * (2 if dtype != torch.float32 else 8)).all())


def test_rows_may_be_a_view():
    wide = random(10, 64, seed=1)
    for weight in (pack(random(24, 16)), pack_tensor(random(24, 16))):
        for x in (wide[:, 16:32], wide[:, :32:2], wide[::2, :16]):
            assert torch.allclose(linear(x, weight), x @ unpacked(weight).T, atol=1e-5)


def test_all_matrices_of_a_model_are_packed_and_of_a_tied_head_a_copy():
    for tied in (False, True):
        config = ModelConfig(100, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_context_len=64,
                             tie_embeddings=tied)  # fmt: skip
        weights = dummy_weights(config, dtype=torch.float32, device=CPU)
        size_bytes = weights.size_bytes
        pack_weights(weights)
        can_pack = not is_plain(pack(random(2, 2)))
        # Panels are filled up with zeros, here the head's 100 outputs to 128 and the layers' not at all.
        filling = 28 * 64 * 4 if isinstance(weights.lm_head, PanelWeight) else 0
        assert weights.size_bytes == size_bytes + filling + (weights.embedding.nbytes if tied and can_pack else 0)
        norms = weights.final_norm.nbytes * (1 + 2 * config.num_layers)
        assert weights_on_host(RunConfig(), config, "cpu") == weights.size_bytes - filling - norms or not can_pack
        assert is_plain(weights.embedding)
        assert all(is_plain(getattr(layer, name)) != can_pack for layer in weights.layers for name in layer.matrices())
        assert weights.layers[0].matrices() == ["qkv", "output", "gate_up", "down"]
        assert is_plain(weights.lm_head) != can_pack


def test_without_the_operator_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(products, "_can_pack", lambda dtype: False)
    monkeypatch.setattr(products, "pays", lambda dtype: False)
    weight = random(8, 8)
    assert pack(weight) is weight
    assert torch.equal(linear(weight, weight), weight @ weight.T)


@pytest.mark.parametrize("own", [True, False], ids=["own kernel", "oneDNN"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_packed_model_have_the_same_bits_in_any_batch(threads, own, monkeypatch):
    if not own:
        monkeypatch.setattr(products, "pays", lambda dtype: False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weights = dummy_weights(MODEL, dtype=torch.float32, device=CPU)
        pack_weights(weights)
        s_part = SPart(MODEL, weights, device=CPU, dtype=torch.float32, batch_invariant=True)
        assert are_row_wise(weights.layers[0]) == isinstance(weights.lm_head, PanelWeight)
        if isinstance(weights.lm_head, PanelWeight):
            assert s_part.layer_tiles == s_part.head_tiles == RowTiles(), "no padding"
        hidden, positions = random(70, MODEL.hidden_size), torch.arange(70) % 64
        whole = s_part.pre_attention(1, hidden, positions)
        for first, last in ((0, 1), (1, 4), (4, 13), (13, 30), (30, 70)):
            assert torch.equal(s_part.pre_attention(1, hidden[first:last], positions[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(before)
