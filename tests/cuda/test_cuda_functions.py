"""Functions of scores inside the kernels of a GPU: every kernel, edges of tiles, options, kept code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu
import pytest
import torch

gpu.need()

from functions import ALL, Functions, flex_attention, formula  # noqa: E402
from test_flex_functions import exact, gradients, judge  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

from selfattn_ext import backends, varlen_attention  # noqa: E402
from selfattn_ext.flex import nvrtc  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:selfattn_ext does not compile")


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Any:
    with torch.device("cuda"):
        yield


def leaves(sizes: Any, dtype: torch.dtype, kv_heads: int | None = None, dim: int = 16) -> list[Tensor]:
    batch, heads, length, keys = sizes
    kv_heads = kv_heads or heads
    shapes = ((batch, heads, length, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim + 8))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def made(name: str, sizes: Any, dtype: torch.dtype) -> Functions:
    return ALL[name](sizes, torch.float64 if dtype == torch.float64 else torch.float32)


def mask_of(functions: Functions, sizes: Any, block_size: Any = 32) -> Any:
    if functions.mask_mod is None:
        return None
    return create_block_mask(functions.mask_mod, *sizes, device="cuda", BLOCK_SIZE=block_size)


def checked(
    name: str,
    sizes: Any,
    dtype: torch.dtype = torch.float32,
    block_size: Any = 32,
    kv_heads: int | None = None,
    **options: Any,
) -> None:
    functions = made(name, sizes, dtype)
    given = leaves(sizes, dtype, kv_heads)
    mask = mask_of(functions, sizes, block_size)
    out = flex_attention(*given, functions.score_mod, mask, enable_gqa=kv_heads is not None, **options)
    judge(name, out, given, functions, **options)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("", torch.float32),
        ("", torch.bfloat16),
        ("", torch.float16),
        ("simt", torch.float64),
        ("simt", torch.float32),
        ("simt", torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["conjunction", "relative_bias"])
def test_every_kernel(name: str, kernel: str, dtype: torch.dtype) -> None:
    with backends.use(kernel):
        checked(name, (2, 2, 67, 71), dtype)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 63, 64, 65, 129])
def test_lengths(length: int) -> None:
    """Few queries, and tiles that are not full."""
    for keys in (1, 64, 65):
        checked("conjunction", (1, 4, length, keys), torch.float64, kv_heads=2)
        if keys > 1:  # the gradients of a single score are 0, which judges no float32
            checked("relative_bias", (1, 4, length, keys), torch.float32, kv_heads=2)


@pytest.mark.parametrize("block_size", [1, 16, 100, 128, (64, 32), (32, 200)], ids=str)
@pytest.mark.parametrize("kernel", ["", "simt"])
def test_block_sizes(kernel: str, block_size: Any) -> None:
    with backends.use(kernel):
        checked("neighbourhood", (1, 2, 150, 133), torch.float32, block_size)


def test_a_map_hides_without_a_function() -> None:
    query, key, value = leaves((1, 2, 64, 64), torch.float32)
    mask = create_block_mask(lambda b, h, q, kv: q // 32 == kv // 32, None, None, 64, 64, BLOCK_SIZE=32)
    mask.mask_mod = lambda b, h, q, kv: kv >= 0
    out = flex_attention(query, key, value, None, mask)
    parts = [(query[:, :, at], key[:, :, at], value[:, :, at]) for at in (slice(0, 32), slice(32, 64))]
    expected = torch.cat([torch.nn.functional.scaled_dot_product_attention(*part) for part in parts], 2)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["mask_mod", "score_mod"])
def test_what_is_hidden_has_no_influence(way: str, dtype: torch.dtype) -> None:
    """NaN in keys and values that a function hides changes no bit of forward and backward."""
    sizes = (1, 2, 70, 66)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv % 5 != 3) | (q < -1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(visible(b, h, q, kv), score * 0.5, -torch.inf)

    mask = create_block_mask(visible, *sizes, device="cuda", BLOCK_SIZE=16) if way == "mask_mod" else None
    function = None if way == "mask_mod" else score_mod
    given = leaves(sizes, dtype)
    clean = flex_attention(*given, function, mask)
    of_clean = torch.autograd.grad(clean.float().square().sum(), given)
    with torch.no_grad():
        spoilt = [tensor.clone() for tensor in given]
        spoilt[1][:, :, 3::5] = torch.nan
        spoilt[2][:, :, 3::5] = torch.inf
    for tensor in spoilt:
        tensor.requires_grad_()
    out = flex_attention(*spoilt, function, mask)
    assert torch.equal(out, clean)
    for found, right in zip(torch.autograd.grad(out.float().square().sum(), spoilt), of_clean, strict=True):
        assert torch.equal(found, right)


def test_indices_beside_a_tensor() -> None:
    query, key, value = leaves((1, 1, 20, 20), torch.float32)
    table = torch.randn(10)
    out = flex_attention(query, key, value, lambda score, b, h, q, kv: score + table[kv])
    assert out.isnan().all()
    causal = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 20, 20)
    out = flex_attention(query, key, value, lambda score, b, h, q, kv: score + table[kv], causal)
    assert out[:, :, 10:].isnan().all()
    assert out[:, :, :10].isfinite().all()


@pytest.mark.parametrize("kernel", ["", "simt"])
def test_options_together(kernel: str) -> None:
    options = {"softcap": 1.5, "alibi_slopes": torch.tensor([0.1, 0.3]), "sinks": torch.tensor([0.5, -1.0])}
    mask = torch.randn(2, 1, 67, 71)
    causal = {"attn_mask": mask, "is_causal": True, "query_offset": 4, "window_size": (40, 0)}
    hiding = {
        "attn_mask": mask.masked_fill(torch.rand(mask.shape) < 0.3, -torch.inf),
        "window_size": (40, 10),
    }
    with backends.use(kernel):
        checked("alibi", (2, 2, 67, 71), **options, **causal)
        checked("neighbourhood", (2, 2, 67, 71), **options, **causal)
        checked("relative_bias", (2, 2, 67, 71), **options, **hiding)


def test_gradients_of_options() -> None:
    sizes = (2, 2, 35, 41)
    functions = made("relative_bias", sizes, torch.float32)
    given = leaves(sizes, torch.float32)
    shapes = {"attn_mask": (2, 1, 35, 41), "alibi_slopes": (2,), "sinks": (2,)}
    named = {name: torch.rand(shape, requires_grad=True) for name, shape in shapes.items()}
    for kernel in ("", "simt"):
        with backends.use(kernel):
            out = flex_attention(*given, functions.score_mod, **named, softcap=2.0)
        found = gradients(out, [*given, *named.values()], functions.learned)
        doubles = [tensor.detach().double().requires_grad_() for tensor in (*given, *named.values())]
        exactly = formula(
            *doubles[:3], functions, **dict(zip(named, doubles[3:], strict=True)), softcap=2.0
        ).out
        for result, right in zip(found, gradients(exactly, doubles, functions.learned), strict=True):
            torch.testing.assert_close(result.double(), right.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["temperature", "t5_buckets", "swin_table", "full_bias", "graph_distances", "of_queries_and_keys"]
)
def test_what_is_learned(name: str, dtype: torch.dtype) -> None:
    """The learned elements are read by all scores, by those of one query or key, or by single scores; there
    are one or several tensors.
    """
    checked(name, (2, 4, 70, 133), dtype, kv_heads=2)


def test_what_is_learned_with_dropout_and_gradients_of_weights() -> None:
    query, key, value = leaves((1, 2, 40, 50), torch.float64)
    table = torch.randn(2, 90, dtype=torch.float64, requires_grad=True)

    def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + table[h, q - kv + 50]

    torch.manual_seed(1)
    out, dropped, lse = flex_attention(
        query, key, value, bias, dropout_p=0.4, return_weights=True, return_lse=True
    )
    torch.testing.assert_close(out, dropped @ value)
    (found,) = torch.autograd.grad((out.sin().sum() + dropped.square().sum() + lse.sum()), table)
    distance = torch.arange(40)[:, None] - torch.arange(50) + 50
    scores = query @ key.mT / 4 + table[:, distance]
    weights = scores.softmax(-1) * (dropped != 0) / 0.6
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    loss = (weights @ value).sin().sum() + weights.square().sum() + scores.logsumexp(-1).sum()
    torch.testing.assert_close(found, torch.autograd.grad(loss, table)[0])


def test_what_is_learned_of_sequences() -> None:
    """The gradient is the sum of what each sequence adds, by the formula."""
    lengths = (1, 70, 0, 17)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randn(3, int(starts[-1]), 2, 16, dtype=torch.float64)
    strength = torch.randn(4, dtype=torch.float64, requires_grad=True)
    table = torch.randn(70, dtype=torch.float64, requires_grad=True)

    def function(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * table[q] - strength[b] * (q - kv).abs()

    out = varlen_attention(*rows.unbind(), starts, starts, 70, 70, score_mod=function)
    loss = torch.zeros((), dtype=torch.float64)
    for number, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        query, key, value = rows[:, begin:end].transpose(1, 2).unbind()
        distance = (torch.arange(end - begin)[:, None] - torch.arange(end - begin)).abs()
        scores = query @ key.mT / 4 * table[: end - begin, None] - strength[number] * distance
        loss = loss + (scores.softmax(-1) @ value).sin().sum()
    expected = torch.autograd.grad(loss, (table, strength))
    for found, right in zip(torch.autograd.grad(out.sin().sum(), (table, strength)), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_what_is_learned_has_nothing_of_hidden_scores() -> None:
    """Hidden scores add nothing even if they are NaN, or read outside of the tensor."""
    query, key, value = leaves((1, 2, 20, 30), torch.float32)
    with torch.no_grad():
        key[:, :, 21], value[:, :, 22] = torch.nan, torch.inf
    table = torch.randn(20, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, kv: kv < 20, None, None, 20, 30)
    for hidden in ({"block_mask": mask}, {"attn_mask": (torch.arange(30) < 20).expand(20, 30)}):
        out = flex_attention(query, key, value, lambda s, b, h, q, kv: s * table[kv], **hidden)
        (found,) = torch.autograd.grad(out.sum(), table)
        part = flex_attention(query, key[:, :, :20], value[:, :, :20], lambda s, b, h, q, kv: s * table[kv])
        torch.testing.assert_close(found, torch.autograd.grad(part.sum(), table)[0])


def test_sequences() -> None:
    """Results are those of each sequence alone, and functions are given the numbers of sequences."""
    lengths = (1, 70, 0, 17)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    query, key, value = torch.randn(3, int(starts[-1]), 2, 16).unbind()
    strength = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def function(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - strength[b] * (q - kv).abs()

    out = varlen_attention(query, key, value, starts, starts, 70, 70, score_mod=function)
    for number, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        part = [tensor[begin:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
        if begin == end:
            continue
        slope = strength[number]
        alone = flex_attention(*part, lambda s, b, h, q, kv, slope=slope: s - slope * (q - kv).abs())
        torch.testing.assert_close(out[begin:end], alone[0].transpose(0, 1))


def test_results_are_the_same_in_each_run() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(7)
        functions = made("conjunction", (2, 2, 130, 140), torch.float32)
        given = leaves((2, 2, 130, 140), torch.bfloat16)
        out = flex_attention(*given, functions.score_mod, mask_of(functions, (2, 2, 130, 140)))
        return [out, *gradients(out, given, functions.learned)]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other numbers, lengths and captured tensors compile nothing; another function does."""
    compiled: list[str] = []
    compile_kernel = nvrtc.compile_kernel

    def counted(text: str, kernel: str, *others: Any) -> nvrtc.Code:
        compiled.append(kernel)
        return compile_kernel(text, kernel, *others)

    monkeypatch.setattr(nvrtc, "compile_kernel", counted)
    monkeypatch.setenv("SELFATTN_FUNCTION_CACHE", str(tmp_path))
    given = leaves((1, 2, 40, 40), torch.float32)

    def run(cap: float, table: Tensor, length: int) -> None:
        rows = [tensor[:, :, :length] for tensor in given]
        flex_attention(*rows, lambda score, b, h, q, kv: cap * torch.tanh(score / cap) * 1.25 + table[h, 3])

    with torch.no_grad():
        run(5.0, torch.zeros(2, 7), 40)
        assert [kernel.split("::")[-1].split("<")[0] for kernel in compiled] != []
        count = len(compiled)
        run(7.0, torch.ones(2, 9)[:, 1:], 33)
        assert len(compiled) == count
        flex_attention(*given, lambda score, b, h, q, kv: score * 1.5 - torch.cos(score))
        assert len(compiled) > count
    assert {file.suffix for file in tmp_path.iterdir()} == {".cubin", ".ptx"}


def test_captured_by_a_graph() -> None:
    query, key, value = leaves((1, 2, 70, 70), torch.float32)
    bias = torch.randn(2)
    function = lambda score, b, h, q, kv: score + bias[h] * (q - kv)  # noqa: E731
    with torch.no_grad():
        expected = flex_attention(query, key, value, function)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flex_attention(query, key, value, function)
        bias.mul_(2)
        graph.replay()
        assert not torch.equal(out, expected)
        assert torch.equal(out, flex_attention(query, key, value, function))


def test_more_tensors_than_a_kernel_is_told_of() -> None:
    sizes = (1, 2, 20, 20)
    tables = [torch.randn(2, 1, 1, 1) for _ in range(40)]
    functions = Functions(lambda score, b, h, q, kv: score + sum(table[h, 0, 0, 0] for table in tables))
    given = leaves(sizes, torch.float32)
    with pytest.warns(UserWarning, match="reads 40 tensors .* more than a kernel of CUDA takes"):
        out = flex_attention(*given, functions.score_mod)
    torch.testing.assert_close(out, exact(given, functions, torch.float32)[0])


def test_a_function_for_the_cpu_is_refused() -> None:
    from selfattn_ext import ops
    from selfattn_ext.build import library

    library.extension().load_cuda_score_function(
        name="for_cuda_alone", score_bytes=4, tensors="", dims=1, numbers=0, make_code=lambda *_: []
    )
    given = torch.randn(3, 1, 1, 4, 8, device="cpu").unbind()
    with pytest.raises((ValueError, RuntimeError), match="is compiled for CUDA, but query is on the CPU"):
        ops.attention_forward(*given, 1.0, score_function="for_cuda_alone")
    with pytest.raises((ValueError, RuntimeError), match="none of the code"):
        ops.attention_forward(*(tensor.cuda() for tensor in given), 1.0, score_function="for_cuda_alone")
