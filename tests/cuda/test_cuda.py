"""CUDA tensors, beyond tests that run on every device: numbers, layouts, randomness, refusals.

test_options_pairwise.py and test_edge_cases.py run on the GPU's kernels, too. Streams, graphs and devices are
in test_cuda_runtime.py, large sizes in test_cuda_sizes.py. With SELFATTN_REQUIRE_CUDA=1 a missing GPU is a
failure, not a skip.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpu
import pytest
import torch
from cases import DTYPES, LAYOUTS, MASKS, Case, check, dropout_seed
from comparisons import exact_and_peer
from tolerances import assert_accurate

from selfattn_ext import (
    attention_scores,
    attention_weights,
    backends,
    masked_softmax,
    ops,
    reference,
    scaled_dot_product_attention,
)

gpu.need()

#: Head dims that the tensor-core kernel pads, head dims that fit, and one that it leaves to the other kernel.
HEAD_DIMS = (16, 64, 80, 128, 192, 256, 320)
PRECISIONS = ("highest", "high", "medium")


@pytest.fixture
def restored_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def qkv(device: str, dtype: torch.dtype, lengths: tuple[int, int] = (70, 130), head_dim: int = 64) -> Any:
    shapes = [(2, 3, length, head_dim) for length in (lengths[0], lengths[1], lengths[1])]
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(head_dim: int, dtype: torch.dtype, cuda_kernel: str) -> None:
    case = Case(heads=4, head_dim=head_dim, value_dim=head_dim, dtype=dtype, device="cuda", lse=True)
    check(replace(case, queries=200, keys=333, is_causal=True, query_offset=133))
    check(replace(case, queries=65, keys=129, value_dim=48, mask="bool"))
    check(replace(case, queries=1, keys=1000, kv_heads=1))


@pytest.mark.parametrize("setting", PRECISIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32_is_as_exact_as_asked(
    setting: str, head_dim: int, cuda_kernel: str, restored_precision: None
) -> None:
    """The judge is the formula on numbers rounded to as many bits as the setting keeps."""
    torch.set_float32_matmul_precision(setting)
    query, key, value = qkv("cuda", torch.float32, (257, 300), head_dim)
    out = scaled_dot_product_attention(query, key, value)
    exact = reference.attention(query.double(), key.double(), value.double()).out
    error = float((out.double() - exact).abs().max())
    # bfloat16 has 8 bits of mantissa; TF32 and two bfloat16 pieces keep 11 or more.
    assert error <= {"highest": 3e-6, "high": 4e-3, "medium": 3e-2}[setting]


@pytest.mark.parametrize(("layout", "dtype"), list(itertools.product(LAYOUTS, DTYPES)), ids=str)
def test_layouts(layout: str, dtype: torch.dtype, cuda_kernel: str) -> None:
    for head_dim in (64, 24, 5):
        case = Case(heads=3, kv_heads=3, queries=66, keys=70, head_dim=head_dim, value_dim=head_dim)
        check(replace(case, layout=layout, dtype=dtype, mask="float", device="cuda"))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_over_several_tiles(mask: str, dtype: torch.dtype, cuda_kernel: str) -> None:
    case = Case(queries=150, keys=270, head_dim=64, value_dim=64, lse=True, device="cuda")
    check(replace(case, mask=mask, dtype=dtype))


def test_masks_of_any_strides(cuda_kernel: str) -> None:
    query, key, value = qkv("cuda", torch.bfloat16)
    base = torch.randn(2, 3, 260, 140, device="cuda")
    for mask in (
        base[:, :, ::2, ::2].mT,
        base[:, :, :70, 1:131],
        base[:1, 1:2, 3:4, :130].expand(2, 3, 70, 130),
        base[..., :70, 5:6].expand(2, 3, 70, 130),
        (base > 0)[:, :, ::2, ::2].mT,
        base.half()[:, 0, :70, 7:137].unsqueeze(1),
    ):
        result = scaled_dot_product_attention(query, key, value, mask)
        assert torch.equal(result, scaled_dot_product_attention(query, key, value, mask.contiguous()))


@pytest.mark.parametrize("shift", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addresses_of_any_alignment(shift: int, dtype: torch.dtype, cuda_kernel: str) -> None:
    """Tensors begin at any address, but their rows fill whole vectors."""
    aligned = qkv("cuda", dtype)
    moved = []
    for tensor in aligned:
        memory = tensor.new_full((tensor.numel() + shift,), torch.nan)
        moved.append(memory[shift:].view(tensor.shape).copy_(tensor))
    assert moved[0].data_ptr() % 16 == (aligned[0].data_ptr() + shift * dtype.itemsize) % 16
    exact, peer = exact_and_peer(aligned)
    assert_accurate("out", scaled_dot_product_attention(*moved), exact["out"], peer["out"])


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_keys_have_no_influence(junk: float, dtype: torch.dtype, cuda_kernel: str) -> None:
    query, key, value = qkv("cuda", dtype)
    seen = torch.rand(130, device="cuda") < 0.5
    seen[64:128] = False  # a whole tile
    expected = scaled_dot_product_attention(query, key, value, seen.expand(70, 130), return_lse=True)
    key[:, :, ~seen] = value[:, :, ~seen] = junk
    found = scaled_dot_product_attention(query, key, value, seen.expand(70, 130), return_lse=True)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    key[:, :, seen.nonzero()[0]] = junk  # a visible score of -inf has weight 0; NaN and inf have not
    assert not scaled_dot_product_attention(query, key, value, seen.expand(70, 130)).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(dtype: torch.dtype, cuda_kernel: str) -> None:
    query, key, value = qkv("cuda", dtype)
    seen = torch.rand(70, 130, device="cuda") < 0.5
    blind = torch.arange(70, device="cuda") % 64 < 3
    seen[blind] = False
    out, weights, lse = scaled_dot_product_attention(
        query, key, value, seen, return_weights=True, return_lse=True
    )
    assert not out[:, :, blind].any()
    assert not weights[:, :, blind].any()
    assert (lse[:, :, blind] == -torch.inf).all()
    assert lse[:, :, ~blind].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout_has_the_pattern_of_the_cpu(dtype: torch.dtype, p: float, cuda_kernel: str) -> None:
    """The same seed tensor drops the same weights, and the output agrees with them."""
    query, key, value = qkv("cuda", dtype)
    seed = dropout_seed(3)
    options = {"dropout_p": p, "kernel_name": cuda_kernel.partition("-")[2]}
    keep = reference.dropout_keep(seed, p, (2, 3, 70, 130))
    out, row_max, row_sum, _ = ops.attention_forward(
        query, key, value, 0.125, dropout_seed=seed.cuda(), **options
    )
    weights = ops.attention_weights(query, key, row_max, row_sum, 0.125, dropout_seed=seed.cuda(), **options)
    plain = ops.attention_weights(query, key, row_max, row_sum, 0.125)
    assert torch.equal((weights != 0).cpu(), keep & (plain != 0).cpu())
    exact, peer = exact_and_peer([query, key, value], {"dropout_p": p, "dropout_seed": seed.cuda()})
    assert_accurate("out", out, exact["out"], peer["out"])
    assert_accurate("weights", weights, exact["weights"], peer["weights"])


def test_dropout_is_governed_by_manual_seed() -> None:
    query, key, value = qkv("cuda", torch.float32)
    torch.manual_seed(1)
    first, second = (scaled_dot_product_attention(query, key, value, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(query, key, value, dropout_p=0.5), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_softmax_and_weights(dtype: torch.dtype, cuda_kernel: str) -> None:
    query, key, _ = qkv("cuda", dtype)
    scores = attention_scores(query, key)
    assert_accurate(
        "scores",
        scores,
        reference.attention_scores(query.double(), key.double()),
        (query @ key.mT / 8).detach(),
    )
    mask = torch.randn(3, 70, 130, device="cuda").masked_fill(
        torch.rand(3, 70, 130, device="cuda") < 0.3, -torch.inf
    )
    for bias, options in (
        (None, {"is_causal": True, "query_offset": 9}),
        (mask, {}),
        (mask > 0, {"scale": 0.5}),
    ):
        exact = reference.masked_softmax(scores.double(), bias, **options)
        assert_accurate("softmax", masked_softmax(scores, bias, **options), exact, exact.to(dtype))
    exact, peer = exact_and_peer([query, key, key], {"is_causal": True})
    assert_accurate(
        "weights", attention_weights(query, key, is_causal=True), exact["weights"], peer["weights"]
    )


#: Three sequences, so that the batch can be split.
OF_THREE = [
    Case(batch=3, heads=4, kv_heads=2, head_dim=64, value_dim=64, device="cuda", **options)
    for options in (
        {"queries": 200, "keys": 300, "dtype": torch.bfloat16, "is_causal": True, "mask": "float heads"},
        {"queries": 200, "keys": 300, "dtype": torch.float16, "window": (100, 20), "softcap": 3.0},
        {"queries": 200, "keys": 300, "alibi": 1, "sinks": True, "lse": True, "weights": True},
        {"queries": 200, "keys": 300, "dtype": torch.float64, "mask": "float square"},
        {"queries": 1, "keys": 5000, "dtype": torch.bfloat16},
    )
]


@pytest.mark.parametrize("case", OF_THREE, ids=str)
def test_bits_depend_on_neither_run_nor_batch(case: Case, cuda_kernel: str) -> None:
    tensors = case.inputs()
    whole = case.run(tensors)
    for _ in range(5):
        again = case.run(tensors)
        assert all(torch.equal(again[name], result) for name, result in whole.items())
    for index in range(case.batch):
        part = {
            name: tensor[index : index + 1].clone() if tensor.dim() == 4 else tensor
            for name, tensor in tensors.items()
        }
        for name, result in replace(case, batch=1).run(part).items():
            assert torch.equal(result[0], whole[name][index]), name


def test_explained() -> None:
    query, key, value = qkv("cuda", torch.bfloat16)
    by_itself = backends.explain(query, key, value)
    assert by_itself.device.startswith("cuda")
    with backends.use("simt"):
        forced = backends.explain(query, key, value)
    assert forced.kernel == "simt"
    assert any("simt is asked for" in reason for reason in forced.refused.values())
    doubles = backends.explain(query.double(), key.double(), value.double())
    assert doubles.kernel == "simt"
    if torch.cuda.get_device_capability() >= (8, 0):
        hopper = torch.cuda.get_device_capability() == (9, 0)
        assert by_itself.kernel == ("sm90" if hopper else "sm80")
        assert any("sm80" in name for name in doubles.refused)
        assert "sm80" in str(doubles)
    else:
        assert by_itself.kernel == "simt"


def test_forced_kernel_runs() -> None:
    """Rounding shows which kernel has run."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        assert backends.explain(*qkv("cuda", torch.bfloat16)).kernel == "simt"
        return
    query, key, value = qkv("cuda", torch.bfloat16, (300, 500))
    results = []
    for name in ("sm90", "sm80", "simt") if capability == (9, 0) else ("sm80", "simt"):
        with backends.use(name):
            results.append(scaled_dot_product_attention(query, key, value, return_lse=True)[1])
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other)


def test_refusals_of_hopper() -> None:
    """The calls that the kernel for Hopper leaves to the next kernel, and the reasons."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    query, key, value = qkv("cuda", torch.bfloat16)
    narrow, wide, odd = (qkv("cuda", torch.bfloat16, head_dim=size) for size in (32, 256, 60))
    mask = torch.ones(70, 130, dtype=torch.bool, device="cuda")
    for tensors, options, reason in (
        ([query.float(), key.float(), value.float()], {}, "only bfloat16 and float16"),
        ([query[:, :, :16], key, value], {}, "few queries"),
        (narrow, {}, "above 32"),
        (wide, {"attn_mask": mask}, "above head dims of 192"),
        (odd, {}, "multiples of 16 bytes"),
        ([query, key[:, :, :1].expand(key.shape), value], {}, "repeated"),
        ([query, key, value[..., :0]], {}, "empty"),
        ([query, key[:, :, :0], value[:, :, :0]], {}, "empty"),
    ):
        explained = backends.explain(*tensors, **options)
        assert explained.kernel == "sm80"
        assert reason in explained.refused["sm90/cuda"]
    assert backends.explain(*wide, is_causal=True).kernel == "sm90"


def test_refusals() -> None:
    query, key, value = qkv("cuda", torch.float32)
    with pytest.raises(ValueError, match=r"key is on cpu.*cuda:0"):
        scaled_dot_product_attention(query, key.cpu(), value)
    with pytest.raises(ValueError, match="attn_mask is on cpu"):
        scaled_dot_product_attention(query, key, value, torch.ones(70, 130))
