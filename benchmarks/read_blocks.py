"""Speed of reading memory in scattered blocks, such as the pages of a KV cache.

A page of 16 tokens of one head of 128 dims in bfloat16 has 4096 bytes. The loop reads and adds; it prefetches
8 KB ahead in the order of the blocks, as the kernels do. It prints a table in Markdown: GB/s, the median over
rounds in which every size has its turn, and the median share of the speed of reading in order in that round.
Run: python benchmarks/read_blocks.py --threads 2
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

from selfattn_ext.bench import peak
from selfattn_ext.build import library

SIZES = [2**power for power in range(11, 19)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="that read")
    parser.add_argument("--rounds", type=int, default=15, help="rounds over all sizes (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    memory = library.extension().MemoryReader(peak.READ_BYTES)
    rounds = [{size: memory.seconds(size) for size in [0, *SIZES]} for _ in range(options.rounds)]
    print("| bytes of a block | GB/s | of reading in order |\n|---|---|---|")
    for size in [0, *SIZES]:
        speed = median(peak.READ_BYTES / taken[size] / 1e9 for taken in rounds)
        share = median(taken[0] / taken[size] for taken in rounds)
        print(f"| {size or 'all'} | {speed:.1f} | {share:.0%} |")


if __name__ == "__main__":
    main()
