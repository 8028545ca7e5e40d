"""A row's bits are its own: tiles, the start-up check, and the layers that run in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.model_shape import Experts, ModelConfig
from fastdecode_hpc.s_part import model
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.row_tiles import RowTiles, find_row_tiles
from fastdecode_hpc.s_part.weights import dummy_weights

CPU = torch.device("cpu")
ROWS = (torch.randn(32, 5, generator=torch.Generator().manual_seed(1)),)
SIZES = (4, 8, 16, 24, 32, 64)


def small_change(x: Tensor) -> Tensor:
    return x * (1 + 2.0**-20)


def test_check_keeps_all_sizes_of_a_function_without_faults() -> None:
    assert find_row_tiles("test", torch.square, ROWS, SIZES) == RowTiles((2, *SIZES))


def test_check_drops_a_row_count_that_rounds_differently() -> None:
    def function(x: Tensor) -> Tensor:
        return small_change(x) if x.shape[0] == 32 else x.clone()

    assert find_row_tiles("test", function, ROWS, SIZES) == RowTiles((8, 16, 24, 64))


def test_check_drops_a_row_count_with_one_odd_place() -> None:
    def function(x: Tensor) -> Tensor:
        out = x.clone()
        if x.shape[0] == 24:
            out[23, 4] = small_change(out[23, 4])
        return out

    assert find_row_tiles("test", function, ROWS, SIZES) == RowTiles((8, 16, 32, 64))


@pytest.mark.parametrize("num_rows", [2, 4, 8, 16])
def test_the_smallest_base_is_taken_only_where_all_larger_sizes_agree_with_it(num_rows: int) -> None:
    def function(x: Tensor) -> Tensor:
        return small_change(x) if x.shape[0] <= num_rows else x.clone()

    assert find_row_tiles("test", function, ROWS, SIZES).sizes[0] == 8
    assert find_row_tiles("test", function, ROWS, (4, 8)).sizes == ((8,) if num_rows < 8 else (2, 4, 8))


def test_check_takes_a_larger_base_where_eight_rows_differ_among_themselves() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cat((small_change(x[:4]), x[4:])) if x.shape[0] == 8 else x.clone()

    assert find_row_tiles("test", function, ROWS, SIZES) == RowTiles((16, 32, 64))


def test_check_falls_back_to_single_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cat((small_change(x[:1]), x[1:])) if x.shape[0] > 1 else x.clone()

    assert find_row_tiles("test", function, ROWS, SIZES) == RowTiles((1,))
    assert "row by row" in caplog.text


def test_check_refuses_a_function_that_never_repeats_itself() -> None:
    calls = itertools.count()

    def function(x: Tensor) -> Tensor:
        return x + next(calls) + torch.arange(x.shape[0])[:, None]

    with pytest.raises(ConfigError, match=r"batch invariance is not possible.*batch_invariant=False"):
        find_row_tiles("test", function, ROWS, SIZES)


def test_check_compares_bits_not_values() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.full_like(x, -0.0 if x.shape[0] == 16 else 0.0)

    assert 16 not in find_row_tiles("test", function, ROWS, SIZES).sizes


def test_check_refuses_larger_sizes_that_agree_with_one_place_only() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cat((small_change(x[:1]), x[1:])) if x.shape[0] in (8, 16) else x.clone()

    assert find_row_tiles("test", function, ROWS, (16,)) == RowTiles((32,))


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 9, 16, 17, 63, 64, 65, 200])
def test_tiles_call_only_their_sizes_and_keep_all_rows(num_rows: int) -> None:
    seen = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return x + y[:, None]

    x, y = torch.randn(num_rows, 3), torch.arange(num_rows)
    out = RowTiles((8, 16, 64)).run(function, x, y)
    assert torch.equal(out, x + y[:, None])
    assert set(seen) <= {8, 16, 64} or num_rows == 0
    assert sum(seen) - num_rows <= 48


@pytest.mark.parametrize(
    ("num_rows", "tiles"),
    [(1, [8]), (9, [16]), (17, [64]), (16, [16]), (65, [64, 8]), (72, [64, 8]), (80, [128]), (300, [128, 128, 64])],
)
def test_split_pads_a_little_or_adds_a_tile(num_rows: int, tiles: list[int]) -> None:
    assert RowTiles((8, 16, 64, 128)).split(num_rows) == tiles


def test_without_sizes_the_batch_runs_whole() -> None:
    seen = []
    RowTiles().run(lambda x: seen.append(x.shape[0]) or x, torch.zeros(13, 2))
    assert seen == [13]


@pytest.fixture(params=[1, 2, 3, 7])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def one_layer(hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=500, hidden_size=hidden, intermediate_size=intermediate, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, max_context_len=512, attention_bias=True, output_bias=True,
        mlp_bias=True,
    )  # fmt: skip


# With 3 or 7 threads torch's own SiLU rounds some rows of the first two differently.
CONFIGS = {
    "smollm2": one_layer(576, 9, 3, 64, 1536),
    "odd": one_layer(576, 9, 3, 64, 1544),
    "tiny": one_layer(64, 4, 2, 16, 100),
}
CONFIGS |= {
    "layer-norm": replace(
        CONFIGS["odd"], norm="layer", activation="gelu", gated=False, parallel=True, rotary_dim=16, residual_scale=0.3
    ),
    "norms": replace(
        CONFIGS["odd"], norm="rms-plus-one", norm_place="both", qk_norm="head", activation="gelu-tanh",
        logit_softcap=3.0, embedding_scale=24.0,
    ),
    "experts": replace(one_layer(576, 9, 3, 64, 200), mlp_bias=False, experts=Experts(8, 2), qk_norm="row"),
    "projected": replace(
        CONFIGS["tiny"], embedding_size=40, rotary_dim=0, position_offset=2, norm="layer", norm_place="sum",
        activation="relu", gated=False, final_norm=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_do_not_depend_on_their_batch_or_place(name: str, num_threads: int) -> None:
    config = CONFIGS[name]
    weights = dummy_weights(config, dtype=torch.float32, device=CPU)
    s_part = SPart(config, weights, device=CPU, dtype=torch.float32, batch_invariant=True)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(300, config.hidden_size, generator=generator)
    o = torch.randn(300, config.q_size, generator=generator)
    positions = torch.randint(0, 512, (300,), generator=generator)
    tokens = torch.randint(0, 500, (300,), generator=generator)

    def run(rows: Tensor) -> Tensor:
        after = s_part.post_attention(0, hidden[rows], o[rows])
        qkv, embedded = (
            s_part.pre_attention(0, hidden[rows], positions[rows]),
            s_part.embed(tokens[rows], positions[rows]),
        )
        return torch.cat((embedded, qkv, after, s_part.logits(after)), dim=1)

    expected = run(torch.arange(300))
    for count in (1, 2, 3, 5, 8, 9, 31, 33, 96, 129, 257, 299):
        rows = torch.randperm(300, generator=generator)[:count]
        assert torch.equal(run(rows), expected[rows]), f"{count} rows, {num_threads} threads"


def test_a_product_that_depends_on_the_row_count_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = model.linear

    def faulty(x: Tensor, *args: Tensor) -> Tensor:
        return small_change(linear(x, *args)) if x.shape[0] in (64, 128) else linear(x, *args)

    monkeypatch.setattr(model, "linear", faulty)
    config = CONFIGS["tiny"]
    weights = dummy_weights(config, dtype=torch.float32, device=CPU)
    s_part = SPart(config, weights, device=CPU, dtype=torch.float32, batch_invariant=True)
    assert not {64, 128} & {*s_part.layer_tiles.sizes, *s_part.head_tiles.sizes}
    assert 32 in s_part.head_tiles.sizes
