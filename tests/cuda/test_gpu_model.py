"""benchmarks/gpu_model.py, without a GPU and without the PTX machine: limits, names, and how counts grow."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import gpu_model
import gpu_model_cases
import gpu_model_counts
import gpu_model_limits
import pytest

from selfattn_ext.bench.kv_cache import CacheCase
from selfattn_ext.bench.varlen import VarlenCase
from selfattn_ext.terminal import CommandError

CLASSES = (
    *("mma_bfloat16", "mma_float16", "float32", "float32_choice", "float64", "float16", "integer"),
    *("comparison", "conversion", "special", "move", "parameter", "ldmatrix", "shared_load", "shared_store"),
    *("global_load", "global_store", "local", "atomic", "copy", "copy_wait", "shuffle", "vote", "barrier"),
    *("warp_barrier", "branch", "other"),
)


def line(kernel: str, blocks: int = 1, **changes: Any) -> dict[str, Any]:
    """A line of the machine's file. Arguments are instructions by class; the sectors that are copied, read,
    and loaded by blocks; and the least wavefronts.
    """
    traffic = {
        name: {"accesses": 0, "bytes": 0, "sectors": 0} for name in ("load", "store", "copy", "atomic")
    }
    traffic["copy"]["sectors"] = changes.get("copied", 0)
    return {
        "kernel": kernel,
        "grid": [blocks, 1, 1],
        "block": [128, 1, 1],
        "dynamic_shared": 0,
        "static_shared": 0,
        "instructions": {name: changes.get(name, 0) for name in CLASSES},
        **traffic,
        "sectors": {
            "read": changes.get("read", 0),
            "written": 0,
            "loaded_by_blocks": changes.get("loaded", 0),
        },
        "shared": {"accesses": 0, "wavefronts": 0, "least": changes.get("least", 0)},
    }


FORWARD = (
    "void selfattn::cuda::sm80::forward_kernel<selfattn::cuda::sm80::Config<(selfattn::DType)2, 64, "
    "(selfattn::cuda::sm80::Path)0> >(selfattn::cuda::sm80::Plan)"
)


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        (FORWARD, "sm80 forward, bare"),
        (FORWARD.replace("Path)0", "Path)2"), "sm80 forward, few queries"),
        (
            "void selfattn::cuda::sm80::backward::backward_kernel<Config<(selfattn::DType)2, 64, "
            "(selfattn::cuda::sm80::backward::Side)1, (selfattn::cuda::sm80::Path)0> >(Plan)",
            "sm80 backward, keys, bare",
        ),
        ("selfattn::cuda::(anonymous namespace)::merge_kernel(selfattn::cuda::MergePlan)", "merge"),
        ("at::native::fill()", "at::native::fill()"),
    ],
)
def test_names(signature: str, name: str) -> None:
    assert gpu_model_counts.short_name(signature) == name


def test_published_rates_agree() -> None:
    """An mma takes a whole number of cycles, so peak, clock and number of multiprocessors fit together."""
    cycles = {}
    for device in gpu_model_limits.DEVICES:
        of_one = device.tensor / device.multiprocessors / device.clock
        cycles[device.name] = gpu_model_limits.MMA_OPERATIONS / of_one
    assert cycles == pytest.approx(
        {"A100 SXM 80 GB": 2, "H100 SXM": 1, "H200 SXM": 1, "RTX 4090": 8}, rel=2e-3
    )


@pytest.mark.parametrize(
    ("changes", "resource", "seconds"),
    [
        # These are cycles of one of 108 multiprocessors at 1.41 GHz.
        ({"mma_bfloat16": 108_000}, "tensor", 2000 / 1.41e9),
        ({"float32": 108_000}, "float", 500 / 1.41e9),
        ({"float64": 108_000}, "float", 1000 / 1.41e9),
        ({"special": 108_000}, "special", 2000 / 1.41e9),
        ({"shuffle": 108_000}, "issue", 250 / 1.41e9),
        ({"least": 108_000}, "shared", 1000 / 1.41e9),
        ({"copied": 160_000}, "L2", 1000 / 1.41e9),
        ({"loaded": 160_000}, "L2", 1000 / 1.41e9),
        ({"read": 2_039_000}, "DRAM", 32e-6),
    ],
)
def test_a_resource_alone(changes: dict[str, int], resource: str, seconds: float) -> None:
    counts = gpu_model_counts.flat(line("k", blocks=1000, **changes))
    bound = gpu_model_limits.bound(counts, gpu_model_limits.A100)
    assert bound.resource == resource
    assert bound.least == pytest.approx(seconds, rel=1e-3)
    # Issuing instructions adds half of the time at most.
    assert sum(bound.share(name) for name in gpu_model_limits.RESOURCES) < 1.51


def test_few_blocks_use_few_multiprocessors() -> None:
    def seconds(blocks: int) -> float:
        counts = gpu_model_counts.flat(line("k", blocks=blocks, mma_bfloat16=1000))
        return float(gpu_model_limits.bound(counts, gpu_model_limits.A100).least)

    assert seconds(1) == pytest.approx(108 * seconds(108))
    assert seconds(108) == seconds(500)


def test_integers_are_not_counted_as_issued() -> None:
    assert set(gpu_model_limits.KEPT) < set(CLASSES)
    counts = gpu_model_counts.flat(
        line("k", integer=7, move=5, branch=3, comparison=2, float32=11, barrier=2)
    )
    assert gpu_model_limits.issued(counts) == 13


def quadratic(length: int, heads: int) -> dict[str, int]:
    """All heads read the same sectors of a mask."""
    return {
        "mma_bfloat16": heads * (3 * length**2 + 5 * length),
        "copied": heads * 2 * length,
        "read": heads * length + length**2,
    }


def counts_of(shape: Any, wrong: str = "") -> dict[str, Any]:
    """The counts of the shape's runs, as the machine would write them, with launches of torch; the run
    `wrong` has more than it should.
    """
    lines: list[dict[str, Any]] = []
    for run in (*shape.counted(), *shape.checked()):
        more = 1.1 if str(run) == wrong else 1.0
        changes = {key: int(more * count) for key, count in quadratic(run.length, run.heads).items()}
        lines += [{"shape": 0, "run": str(run)}, line("void at::native::fill()", mma_bfloat16=9)]
        lines += [line(FORWARD, blocks=run.heads * run.length // 128, **changes)]
    runs = gpu_model_counts.read("".join(json.dumps(one) + "\n" for one in lines))
    return {run: kernels for (_, run), kernels in runs.items()}


def test_counts_of_a_long_call() -> None:
    shape = gpu_model_cases.shapes()[3]
    assert shape.case.length == 8192
    (kernel,) = gpu_model_counts.whole_call(shape, counts_of(shape))
    assert shape.heads == shape.case.batch * shape.case.heads
    assert kernel.deviation < 1e-12
    for name, count in quadratic(8192, shape.heads).items():
        key = {"copied": "copy.sectors", "read": "sectors.read"}.get(name, f"instructions.{name}")
        assert kernel.counts[key] == pytest.approx(count)
    assert kernel.counts["blocks"] == pytest.approx(shape.heads * 64)
    assert kernel.counts["launches"] == pytest.approx(1)


@pytest.mark.parametrize("wrong", ["1024x1", "512x2", "2048x1", "512x3"])
def test_counts_that_grow_otherwise_are_seen(wrong: str) -> None:
    shape = gpu_model_cases.shapes()[0]
    (kernel,) = gpu_model_counts.whole_call(shape, counts_of(shape, wrong))
    assert kernel.deviation > 0.05


def test_runs_must_launch_the_same_kernels() -> None:
    shape = gpu_model_cases.shapes()[0]
    runs = counts_of(shape)
    runs["512x3"] = {"another": next(iter(runs["512x3"].values()))}
    with pytest.raises(CommandError, match="different kernels"):
        gpu_model_counts.whole_call(shape, runs)


def test_runs_are_parts_of_their_calls() -> None:
    for shape in gpu_model_cases.shapes():
        whole = shape.case
        for run in (*shape.counted(), *shape.checked()):
            case = shape.call(run)
            assert case.heads * whole.kv_head_count == whole.heads * case.kv_head_count
            elements = 1 if isinstance(whole, VarlenCase | CacheCase) else case.batch
            assert elements * case.kv_head_count == run.heads
            assert case.length == run.length
            same = {"batch": whole.batch, "heads": whole.heads, "kv_heads": whole.kv_heads}
            assert replace(case, length=whole.length, **same) == whole


def test_tables() -> None:
    shape = gpu_model_cases.shapes()[0]
    counted = [(shape, gpu_model_counts.whole_call(shape, counts_of(shape)))]
    tables = [("counts", *gpu_model.counts_table(counted))]
    tables += [("A100", *gpu_model.bounds_table(counted, gpu_model_limits.A100))]
    tables += [("devices", *gpu_model.summary(counted, gpu_model_limits.DEVICES))]
    for _, header, cells in tables:
        assert [len(cell) for cell in cells] == [len(header)]
    assert "| tensor | 100% |" in gpu_model.as_markdown(*tables[1][1:])
    assert len(json.dumps(gpu_model.as_data(counted))) > 0


def test_a_name_that_no_call_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_model.main(["--only", "no such call"]) == 2
    assert "no call has 'no such call' in its name" in capsys.readouterr().err
