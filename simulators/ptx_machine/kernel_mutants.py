"""The mutants of the CUDA kernels that mutate_kernels.py runs: statements, bounds and terms to leave out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .build import CSRC

_CALLS = "|".join(
    [
        "__syncthreads|__syncwarp|copy_async_commit|copy_async_wait(?:<[^>]*>)?",
        "barrier_init_fence|barrier_arrive|barrier_arrive_expecting|barrier_wait",
        "fence_async_proxy|sync_threads|arrive_threads",
        "products_fence|products_commit|products_wait(?:<[^>]*>)?",
        # These functions of sm90 contain one or two such statements.
        "wait_for_warp|arrive_of_warp|show|finish_queries|take_turn|give_turn",
        "leave_(?:summed|multiplied|last)|finish_sums(?:<[^>]*>)?",
    ]
)
#: A whole statement, on one line or more, but not the beginning of a function's definition.
STATEMENT = re.compile(rf"(?<!\w)(?:\w+::)*(?:{_CALLS})\s*\([^;{{}}]*?\)\s*;")

#: Places where sequences of a packed backward end: a file below csrc/cuda, a bound that occurs in it once,
#: and what replaces the bound in the mutant.
BOUNDS = [
    ("mma/backward/backward_work.cuh", "(C::kOwnsQueries ? queries : keys) - first_row", "C::kRows"),
    (
        "mma/backward/backward_work.cuh",
        "(C::kOwnsQueries ? keys : queries) - passing.first",
        "C::kTileColumns",
    ),
    ("mma/backward/backward_place.cuh", "min(row_of_tile, this->work.rows - 1)", "row_of_tile"),
    ("mma/backward/backward_place.cuh", "min(end, work.end - at.passing.first)", "end"),
    ("mma/backward/backward_place.cuh", "row_of_tile >= work.rows", "false"),
    ("mma/backward/backward_place.cuh", "at.work.rows < C::kRows", "false"),
    ("mma/backward/backward_place.cuh", "row_of_tile < at.work.rows", "true"),
    ("mma/backward/backward_place.cuh", "kColumns && query < at.queries()", "kColumns"),
    ("sm80/backward/sm80_gradients.cuh", "work_.rows <= 0", "false"),
    (
        "mma/backward/backward_epilogue.cuh",
        "min(lane.first_row + C::kWarpRows, work.rows)",
        "lane.first_row + C::kWarpRows",
    ),
    ("sm80/backward/sm80_mask_gradient.cuh", "rows <= 0", "false"),
    ("sm80/backward/sm80_mask_gradient.cuh", "passing.first >= range.end", "false"),
    ("sm80/backward/sm80_mask_gradient.cuh", "lane().first_row >= rows", "false"),
    ("mma/backward/backward_statistics.cuh", "query < sequence.queries", "true"),
    ("mma/backward/backward_statistics.cuh", "query >= round_up(sequence.queries, kQueryPadding)", "false"),
    ("rows/row_gradients.cuh", "query_of_sequence >= sequence.queries", "false"),
    ("simt/selected_tile.cuh", "limited(end - first_query, 0, tiles.at_once)", "tiles.at_once"),
    ("simt/selected_tile.cuh", "key < keys", "true"),
    ("simt/selected_backward.cuh", "limited(end - first_key, 0, int64_t{kRows<T>})", "int64_t{kRows<T>}"),
    ("simt/selected_backward.cuh", "query >= queries", "false"),
    ("simt/tangents.cuh", "rows_left <= 0", "false"),
    ("simt/tangents.cuh", "row >= rows_left", "false"),
    ("simt/tangent_tile.cuh", "query < tile.rows()", "true"),
]

#: Terms of second derivatives, in the same form.
TERMS = [
    ("simt/tangent_tile.cuh", "n.delta * pair.tangent", "T(0)"),
    ("simt/tangent_tile.cuh", "pair.tangent - n.mean", "pair.tangent"),
    ("simt/tangent_tile.cuh", "keep * of_tangent", "of_tangent"),
    ("simt/tangent_tile.cuh", "a - n.correction", "a"),
    ("simt/tangent_tile.cuh", "curvature * first * dot_tangent", "T(0)"),
    ("simt/tangents.cuh", "multiply_add(weight, tangent, sum)", "sum"),
    ("simt/tangents.cuh", "multiply_add(weight, of_sink, sum)", "sum"),
]

#: Statements whose loss no test can notice: (folder/file, statement) -> reason.
EQUIVALENT: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        (("simt/forward.cuh", "__syncwarp();"), ("simt/selected_forward.cuh", "__syncwarp();")),
        "a barrier of the block comes before the weights are read",
    ),
    (
        "simt/selected_backward.cuh",
        "query >= queries",
    ): "only a row of a sequence that overlaps another holds such a query",
    ("simt/tangents.cuh", "rows_left <= 0"): "a block without rows writes nothing, as in the backward below",
    (
        "backward/sm90_gradients.cuh",
        "leave_last();",
    ): "after sm90's careful pass nothing asks for the place; after the other pass tests notice",
    (
        "backward/sm80_gradients.cuh",
        "work_.rows <= 0",
    ): "a block without rows writes nothing; it leaves to save time",
    (
        "backward/backward_place.cuh",
        "at.work.rows < C::kRows",
    ): "visible_columns hides the last row as well; this is quicker",
    (
        "backward/backward_place.cuh",
        "row_of_tile >= work.rows",
    ): "rows beyond the last have a weight of 0 or are not written",
    (
        "backward/backward_place.cuh",
        "row_of_tile < at.work.rows",
    ): "rows beyond the last are given the last one's bits, and visible_columns hides them",
    (
        "backward/sm80_mask_gradient.cuh",
        "rows <= 0",
    ): "an item without rows adds zeros; leaving it saves time",
    (
        "backward/sm80_mask_gradient.cuh",
        "passing.first >= range.end",
    ): "an item that nobody sees adds zeros; leaving it saves time",
    ("backward/sm80_mask_gradient.cuh", "lane().first_row >= rows"): "a warp without rows adds zeros, too",
    (
        "backward/backward_statistics.cuh",
        "query < sequence.queries",
    ): "results of queries beyond the last are hidden, whatever they are",
}


@dataclass(frozen=True)
class Mutant:
    file: Path  # relative to csrc
    line: int
    text: str
    start: int
    end: int
    instead: str = ""  # what replaces an expression

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def mutants() -> Iterator[Mutant]:
    """Every synchronisation statement of csrc/cuda, the bounds and the terms."""
    for name, bound, instead in [*BOUNDS, *TERMS]:
        path = CSRC / "cuda" / name
        source = path.read_text(encoding="utf-8")
        if source.count(bound) != 1:
            raise ValueError(f"{path} holds {bound!r} {source.count(bound)} times")
        start = source.index(bound)
        line = source.count("\n", 0, start) + 1
        yield Mutant(path.relative_to(CSRC), line, bound, start, start + len(bound), instead)
    for path in sorted((CSRC / "cuda").rglob("*.cuh")):
        if path.name.startswith("ptx_"):
            continue
        source = path.read_text(encoding="utf-8")
        for found in STATEMENT.finditer(source):
            line = source.count("\n", 0, found.start()) + 1
            if "//" in source.splitlines()[line - 1][: found.start() - source.rfind("\n", 0, found.start())]:
                continue  # it is in a comment
            text = " ".join(found[0].split())
            yield Mutant(path.relative_to(CSRC), line, text, found.start(), found.end())


def write(found: Sequence[Mutant], csrc: Path) -> None:
    """Writes a copy of the sources in which each statement can be left out, by its number from 1. Files that
    have not changed stay as they are, so that they are not compiled again.
    """
    texts = {path.relative_to(CSRC): path.read_text(encoding="utf-8") for path in CSRC.rglob("*.*")}
    # Replacements go from the end of a file to its beginning, so that earlier positions stay valid.
    for number, mutant in sorted(enumerate(found, 1), key=lambda it: it[1].start, reverse=True):
        source = texts[mutant.file]
        statement = source[mutant.start : mutant.end]
        left_out = f"::selfattn::cuda::leaves_out({number})"
        if mutant.instead:
            asked = f"({left_out} ? ({mutant.instead}) : ({statement}))"
        else:
            # This is an expression, because it may follow "return".
            asked = f"({left_out} ? void() : {statement.rstrip('; ')});"
        texts[mutant.file] = source[: mutant.start] + asked + source[mutant.end :]
    device = Path("cuda/common/device.cuh")
    texts[device] += LEAVES_OUT
    for stale in {path.relative_to(csrc) for path in csrc.rglob("*.*")} - texts.keys():
        (csrc / stale).unlink()
    for name, text in texts.items():
        path = csrc / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


#: A kernel asks a register that the machine fills. The number may change from launch to launch.
LEAVES_OUT = """
namespace selfattn::cuda {
__device__ __forceinline__ bool leaves_out(unsigned statement) {
  unsigned left_out;
  asm volatile("mov.u32 %0, %%envreg0;" : "=r"(left_out));
  return left_out == statement;
}
}  // namespace selfattn::cuda
"""
