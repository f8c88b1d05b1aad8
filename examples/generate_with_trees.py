"""Speculative decoding with trees of guessed tokens, for several sequences that share a prefix.

    python examples/generate_with_trees.py
    python examples/generate_with_trees.py --text book.txt --sequences 8 --branches 4 2 1 1

It trains a small model for some seconds, and then continues one prompt in several ways. What comes next is
guessed by a table: the symbols that followed the last two symbols most often in the training text. The
guesses form a tree (Miao et al. 2024, "SpecInfer"). With --branches 3 2 1 the last known token has three
guesses, each of these has two for the token after it, and each of those has one. A step of the model computes
the whole tree. Guesses that are what the model itself chooses, one after the other from the root, are
accepted, and the model's choice after them is a new token. So the text is that of one token at a time, in
fewer steps.

A token of a tree sees three sets of keys, with a call for each, and merge_attention puts the results
together: the prefix, which is computed and kept once for all sequences; the tokens that its own sequence has
accepted; and within the tree itself and its ancestors, by a mask that has the size of the tree alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from selfattn_ext import KVCache, attention_with_kvcache, merge_attention, scaled_dot_product_attention
from selfattn_ext.demo import text
from selfattn_ext.demo.model import CharTransformer, ModelSize, extension_attention
from selfattn_ext.terminal import CommandError


def tree_of(branches: Sequence[int]) -> list[int]:
    """Returns the parent of each token of a tree, level by level; token 0 is the root and has none, -1."""
    parents, level = [-1], [0]
    for count in branches:
        first = len(parents)
        parents += [parent for parent in level for _ in range(count)]
        level = list(range(first, len(parents)))
    return parents


def tree_mask(parents: Sequence[int]) -> Tensor:
    """Returns the mask (T, T) by which each token sees itself and its ancestors, which come before it."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents[1:], 1):
        mask[token] |= mask[parent]
    return mask


def attend_to_shared(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of queries (B, H, T, E) to keys (1, H, S, E) of all sequences: that of one sequence with B·T
    queries. Returns out and lse.
    """
    folded = query.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    out, lse = scaled_dot_product_attention(folded, key, value, return_lse=True)
    out, lse = (each.squeeze(0).unflatten(1, (len(query), -1)).transpose(0, 1) for each in (out, lse))
    return out, lse


class TreeCache:
    """The keys of a prefix, of each sequence's own tokens, and of a step's trees. It takes the place of a
    :class:`selfattn_ext.KVCache` in the model.
    """

    def __init__(self, prefix: KVCache, own: KVCache, parents: Sequence[int]) -> None:
        self._prefix, self._own = prefix, own
        self._mask = tree_mask(parents)
        self._trees: list[tuple[Tensor, Tensor]] = []  # the keys and values of each layer

    @property
    def positions(self) -> Tensor:
        """The positions (1, B, 1, T) of the tokens: siblings have the same one."""
        first = self._prefix.lengths[0] + torch.tensor(self._own.lengths)
        return (first[:, None, None] + self._mask.sum(-1) - 1).unsqueeze(0)

    def extend(self, tokens: int) -> None:
        """Begins a step."""
        self._trees.clear()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the trees' tokens (B, H, T, E) to all that they see."""
        self._trees.append((key, value))
        lengths = torch.tensor(self._own.lengths)
        keys, values = self._own.keys[layer], self._own.values[layer]
        shared = attend_to_shared(query, self._prefix.keys[layer], self._prefix.values[layer])
        own = attention_with_kvcache(query, keys, values, cache_seqlens=lengths, return_lse=True)
        tree = scaled_dot_product_attention(query, key, value, self._mask, return_lse=True)
        out, _ = merge_attention(*zip(shared, own, tree, strict=True))
        return out

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Appends the tokens on a path through each sequence's tree to what the sequence has."""
        self._own.extend([len(path) for path in paths])
        for layer, tensors in enumerate(self._trees):
            # Packed, (tokens of all sequences, H, E).
            key, value = (
                torch.cat([one[:, list(path)] for one, path in zip(each, paths, strict=True)], 1).transpose(
                    0, 1
                )
                for each in tensors
            )
            self._own.append(layer, key, value)


def followers(tokens: Tensor, symbols: int, count: int) -> Tensor:
    """Returns the symbols (symbols, symbols, count) that follow each two symbols most often."""
    places = (tokens[:-2] * symbols + tokens[1:-1]) * symbols + tokens[2:]
    counts = places.bincount(minlength=symbols**3)
    return counts.view(symbols, symbols, symbols).topk(count).indices


def guesses(parents: Sequence[int], before: Tensor, root: Tensor, table: Tensor) -> Tensor:
    """Returns the tokens (B, T) of trees, whose roots (B,) come after the tokens ``before``."""
    tokens, earlier = [root], [before]
    for token, parent in enumerate(parents[1:], 1):
        rank = parents[1:token].count(parent)  # siblings that have a guess already
        tokens.append(table[earlier[parent], tokens[parent], rank])
        earlier.append(tokens[parent])
    return torch.stack(tokens, 1)


def accepted(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Returns the path from the root on which each token is the model's choice after its parent."""
    path = [0]
    for token, parent in enumerate(parents):
        if parent == path[-1] and tokens[token] == choices[parent]:
            path.append(token)
    return path


class Generated(NamedTuple):
    tokens: list[list[int]]  # of each sequence, without the prompt
    steps: int


@torch.inference_mode()
def generate(
    model: CharTransformer, prompt: Tensor, sequences: int, count: int, branches: Sequence[int], table: Tensor
) -> Generated:
    """Continues a prompt (length,) by ``count`` tokens, in as many ways as there are sequences: each begins
    with one of the likeliest symbols, and goes on with what the model finds likeliest.
    """
    size, parents = model.size, tree_of(branches)
    prefix = KVCache(size.layers, 1, size.heads, size.head_dim, len(prompt))
    first = model(prompt[None], prefix)[0, -1].topk(sequences).indices
    own = KVCache(size.layers, sequences, size.heads, size.head_dim, count)
    cache = TreeCache(prefix, own, parents)
    found, steps = [[token] for token in first.tolist()], 0
    while min(map(len, found)) < count:
        before = torch.tensor([[*prompt.tolist(), *tokens][-2] for tokens in found])
        root = torch.tensor([tokens[-1] for tokens in found])
        trees = guesses(parents, before, root, table)
        choices = model(trees, cache).argmax(-1).tolist()
        paths: list[list[int]] = []
        for sequence, (tokens, tree) in enumerate(zip(found, trees.tolist(), strict=True)):
            path = accepted(parents, tree, choices[sequence])[: count - len(tokens)]
            tokens += [choices[sequence][token] for token in path]
            paths.append(path)
        cache.keep(paths)
        steps += 1
    return Generated(found, steps)


@torch.inference_mode()
def are_choices(model: CharTransformer, prompt: Tensor, found: Sequence[Sequence[int]]) -> bool:
    """Tells whether one pass over the whole texts, without caches and trees, chooses the same tokens."""
    tokens = torch.tensor(found)
    whole = torch.cat([prompt.expand(len(found), -1), tokens], 1)
    choices = model(whole).argmax(-1)[:, len(prompt) : -1]
    return torch.equal(choices, tokens[:, 1:])


def main(argv: Sequence[str] | None = None) -> Generated:
    """Trains, generates, prints the texts, and returns them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a UTF-8 file; by default the texts of Python's help()")
    sizes = {"layers": 2, "heads": 4, "width": 128, "context": 128, "batch": 8, "steps": 300}
    sizes |= {"prompt": 32, "sequences": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    branches = parser.add_argument(
        "--branches", type=int, nargs="*", default=[3, 2, 1], help="guesses by level"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="the learning rate")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    if any(count < 1 for count in given.branches):
        parser.error(f"{branches.option_strings[0]} must be numbers above 0")

    torch.manual_seed(given.seed)
    source = text.from_file(given.text) if given.text else text.from_python()
    corpus = text.Corpus(source, given.context)
    size = ModelSize(given.layers, given.heads, given.width, given.context)
    symbols = len(corpus.symbols)
    model = CharTransformer(symbols, size, extension_attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    drawn = torch.Generator().manual_seed(given.seed)
    for step in range(1, given.steps + 1):
        loss = model.loss(*corpus.batch(given.batch, drawn))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % max(1, given.steps // 5) == 0:
            print(f"step {step:5d}   loss {loss.item():.3f}", flush=True)

    prompt = corpus.prompt(given.prompt)
    count = given.context - given.prompt - len(given.branches)  # a tree has positions, too
    table = followers(corpus.training, symbols, min(symbols, max([1, *given.branches])))
    found = generate(model, prompt, given.sequences, count, given.branches, table)
    print(f"\nthe prompt: {corpus.decode(prompt)!r}")
    for tokens in found.tokens:
        print(f"  {corpus.decode(torch.tensor(tokens))!r}")
    tree = len(tree_of(given.branches))
    print(f"{count} tokens for each in {found.steps} steps, with trees of {tree} tokens")
    same = are_choices(model, prompt, found.tokens)
    print("one pass over the texts chooses " + ("the same tokens" if same else "other tokens"))
    return found


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        sys.exit(f"error: {error}")
