"""A Hugging Face model generates text on this package's kernels.

    pip install 'selfattn_ext[transformers]'
    python examples/generate_transformers.py
    python examples/generate_transformers.py --model google/gemma-2-2b-it --dtype bfloat16

Without --model it is a small Gemma 2 with random weights, which needs no network and whose text has no
meaning. Its tokens are bytes, of which it generates only printable ones. The kernels compute its softcap,
sliding window and grouped heads, and the padding of the shorter prompt, without a mask of (L, S) elements.
--compare generates with transformers' own attention as well, and prints whether the tokens are the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, PreTrainedModel

from selfattn_ext.integrations import transformers as integration

PRINTABLE = range(ord(" "), ord("~") + 1)  # the characters of ASCII
PROMPTS = ("Attention is", "The quick brown fox jumps over")


class Bytes:
    """A tokenizer whose tokens are bytes; it pads on the left, with 0."""

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        rows = [torch.tensor(list(text.encode())) for text in texts]
        length = max(map(len, rows))
        ids = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def decode(self, ids: Tensor) -> str:
        return bytes(ids.tolist()).decode()


class Pretrained:
    """The tokenizer of a model, with the same two methods."""

    def __init__(self, name: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        return dict(self.tokenizer(list(texts), return_tensors="pt", padding=True))

    def decode(self, ids: Tensor) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def random_model(options: argparse.Namespace) -> PreTrainedModel:
    """Returns a Gemma 2 of 256 tokens, with weights larger than initial ones, so that attention matters."""
    torch.manual_seed(options.seed)
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=options.dim,
        intermediate_size=3 * options.dim,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=16,
        query_pre_attn_scalar=32,
        initializer_range=0.2,
        tie_word_embeddings=False,  # with tied ones it would repeat itself
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="selfattn_ext")
    model.generation_config.suppress_tokens = [token for token in range(256) if token not in PRINTABLE]
    return model


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], options: argparse.Namespace) -> Tensor:
    """Generates new tokens, greedily, and prints how long each took."""
    start = time.perf_counter()
    with torch.no_grad():
        ids = model.generate(
            **inputs,
            max_new_tokens=options.tokens,
            do_sample=False,
            cache_implementation="static" if options.static else None,
        )
    seconds = time.perf_counter() - start
    new = ids[:, inputs["input_ids"].shape[1] :]
    print(f"{model.config._attn_implementation}: {1000 * seconds / new.shape[1]:.1f} ms per token")
    return new


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate with a Hugging Face model on selfattn_ext.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="the texts to continue, in one batch")
    parser.add_argument("--model", help="a model of the Hub or a folder; random weights otherwise")
    parser.add_argument("--dtype", default="float32", help="dtype of its weights (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where it runs (%(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate (%(default)s)")
    parser.add_argument("--static", action="store_true", help="use a cache of fixed size")
    parser.add_argument("--layers", type=int, default=4, help="layers of the random model (%(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="its width (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of its weights (%(default)s)")
    parser.add_argument("--compare", metavar="NAME", help="generate with this attention, too, such as eager")
    options = parser.parse_args(arguments)

    integration.register()
    if options.model:
        tokenizer = Pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="selfattn_ext")
    else:
        tokenizer, model = Bytes(), random_model(options)
    model = model.to(options.device, getattr(torch, options.dtype)).eval()
    inputs = {name: value.to(options.device) for name, value in tokenizer(options.prompts).items()}

    new = generate(model, inputs, options)
    for prompt, ids in zip(options.prompts, new, strict=True):
        print(f"  {prompt!r} -> {tokenizer.decode(ids)!r}")
    if options.compare:
        model.set_attn_implementation(options.compare)
        same = torch.equal(generate(model, inputs, options), new)
        print("the tokens are the same" if same else "the tokens are not the same")


if __name__ == "__main__":
    main()
