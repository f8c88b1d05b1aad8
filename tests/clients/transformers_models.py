"""Small models of Hugging Face transformers with random weights, and their judges.

The judge is the model in float64, with attention by the formula below, which stays in float64:
transformers' own eager functions compute the softmax in float32, and give NaN for padded float64 models.
The peer is "eager" in the tested dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from tolerances import assert_accurate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, eager_mask

from selfattn_ext.integrations import transformers as integration

NAME = "selfattn_ext"
FORMULA = "formula"
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
TOKENS = 97

integration.register(NAME)
transformers.logging.set_verbosity_error()

SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**SIZES, "num_key_value_heads": 2}
_NARROW = {**_GROUPED, "head_dim": 8, "sliding_window": 5}
_GEMMA = {**_NARROW, "query_pre_attn_scalar": 8}
_LAYERS = ["sliding_attention", "full_attention"]
_GPT2 = {
    "vocab_size": TOKENS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
T5 |= {"num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
#: Keys and values that are compressed. The layers have no experts, which 4.57 cannot compute in float64.
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
}

#: name -> the configuration of a model that generates text.
DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "gpt2 layer scale": lambda: transformers.GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True),
    "llama gqa": lambda: transformers.LlamaConfig(**_GROUPED),
    "mistral": lambda: transformers.MistralConfig(**_GROUPED, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**_GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=8),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "opt": lambda: transformers.OPTConfig(
        **{**SIZES, "intermediate_size": None}, ffn_dim=48, word_embed_proj_dim=32
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**_GEMMA, attn_logit_softcapping=0.5),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GEMMA, layer_types=_LAYERS),
    "gpt-oss": lambda: transformers.GptOssConfig(**_NARROW, num_local_experts=2, num_experts_per_tok=1),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**LATENT),
}


def formula(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Computes attention as in textbooks, in the dtype of the query."""
    assert dropout == 0
    if scaling is None:
        scaling = query.size(-1) ** -0.5
        if getattr(module, "scale_attn_by_inverse_layer_idx", False):
            scaling = scaling / (module.layer_idx + 1)
    group = query.size(1) // key.size(1)
    scores = scaling * query @ key.repeat_interleave(group, 1).mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for added in (position_bias, attention_mask):
        if added is not None:
            scores = scores + added[..., : key.size(2)]
    places = torch.arange(key.size(2)).unsqueeze(-1)
    if indices is not None:
        scores = scores.masked_fill(~(indices.unsqueeze(-2) == places).any(-1).unsqueeze(1), -torch.inf)
    if block_indices is not None:
        shown = (block_indices.unsqueeze(-2) == places // module.indexer.block_size).any(-1)
        scores = scores.masked_fill(~shown.repeat_interleave(query.size(1) // shown.size(1), 1), -torch.inf)
    if s_aux is not None:
        logits = s_aux.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], dim=-1)
    weights = torch.softmax(scores, -1)[..., : key.size(2)]
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), weights


AttentionInterface.register(FORMULA, formula)
AttentionMaskInterface.register(FORMULA, eager_mask)


def randomized(model: nn.Module) -> nn.Module:
    """Sets weights so large that attention matters: with initial weights, all scores are nearly equal."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def built(config: Any, kind: Any = transformers.AutoModelForCausalLM) -> nn.Module:
    """Builds a model of the configuration on our attention."""
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the other implementations have no float64
    torch.manual_seed(0)
    return randomized(kind.from_config(config, attn_implementation=NAME))


class Trio:
    """A model on our attention, its peer on eager attention, and its judge in float64 on the formula."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        model = model.to(dtype)
        self.ours = model
        self.peer = as_implementation(copy.deepcopy(model), "eager")
        self.exact = as_implementation(copy.deepcopy(model).double(), FORMULA)
        self.dtype = dtype

    def check(self, run: Callable[[nn.Module], dict[str, Tensor]], least_calls: int = 1) -> dict[str, Tensor]:
        """Asserts that ``run`` calls our kernels, and gives results as accurate as with eager attention."""
        with kernel_calls() as calls:
            ours = run(self.ours)
        assert len(calls) >= least_calls, f"{len(calls)} calls of our operators"
        with kernel_calls() as calls:
            exact, peer = run(self.exact), run(self.peer)
        assert not calls, "the judges used our kernels"
        sizes = {name: float(numbers.abs().max()) for name, numbers in exact.items()}
        largest = max((size for name, size in sizes.items() if name.startswith("grad of")), default=1.0)
        for name, result in ours.items():
            size = sizes[name]
            if name.startswith("grad of") and size <= 1e-12 * largest:
                # This gradient is 0 except for float64's rounding, like a key bias's: eager's error in it is
                # noise, and its terms are as large as other gradients' terms.
                size = largest
            assert_accurate(name, result, exact[name], peer[name], max(size, 1.0), self.dtype)
        return ours


def as_implementation(model: nn.Module, name: str) -> nn.Module:
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
        return model
    # Some models of 4.57 keep the attention they were built with. Their "sdpa", if any, stays in float64.
    name = "sdpa" if name in (FORMULA, "sdpa") and model._supports_sdpa else "eager"
    other = type(model)._from_config(model.config, attn_implementation=name)
    other.load_state_dict(model.state_dict())
    return other.to(next(model.parameters()).dtype).eval()


@contextmanager
def kernel_calls() -> Iterator[list[str]]:
    """Records the names of our operators in the order of their calls."""
    called: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.namespace == "selfattn":
                called.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Record():
        yield called


def tokens(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(3, TOKENS, (batch, length), generator=torch.Generator().manual_seed(2))


def padding(ids: Tensor, side: str) -> Tensor:
    """Returns an attention mask that hides three tokens of the first sequence."""
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :3] = 0
    elif side == "right":
        mask[0, -3:] = 0
    return mask


def mask_arguments(queries: int, offset: int, keys: int, key_offset: int = 0, **more: Any) -> dict[str, Any]:
    """Returns arguments of a mask function for the installed version of transformers."""
    where: dict[str, Any] = {"q_length": queries, "q_offset": offset, "device": torch.device("cpu")}
    if VERSION < (5, 0):
        where = {"cache_position": torch.arange(queries) + offset}
    defaults = {"mask_function": causal_mask_function, "attention_mask": None}
    return {"batch_size": 2, "kv_length": keys, "kv_offset": key_offset, **where, **defaults, **more}


def text(side: str) -> dict[str, Tensor]:
    """Returns the inputs of a text, padded on a side or "none"."""
    ids = tokens()
    return {"input_ids": ids, **({} if side == "none" else {"attention_mask": padding(ids, side)})}


def pair(side: str) -> dict[str, Tensor]:
    """Returns a text, and the beginning of another text that the model continues."""
    ids = tokens(length=6) + 1
    mask = {} if side == "none" else {"decoder_attention_mask": padding(ids, "right")}
    return {**text(side), "decoder_input_ids": ids, **mask}


def image(side: str) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))}


def in_dtype(inputs: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def logits_of(model: nn.Module, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    """Returns a model's first result, which mostly are logits, outside of the padding."""
    logits: Tensor = model(**in_dtype(inputs, model), **more)[0]
    prefix = "decoder_" if "decoder_input_ids" in inputs else ""
    seen = inputs.get(f"{prefix}attention_mask")
    return logits if seen is None else logits[seen.bool()]


def generated(model: nn.Module, inputs: dict[str, Tensor], steps: int, **options: Any) -> dict[str, Tensor]:
    """Generates tokens; returns them, too, because later logits of different tokens are no judges."""
    with torch.no_grad():
        # Whisper has a function of its own, which makes features of longer sound.
        result = transformers.GenerationMixin.generate(
            model,
            **in_dtype(inputs, model),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    return {"tokens": result.sequences.double(), "logits": torch.stack(result.logits)}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of all parameters, by "grad of" and the parameter's name."""
    model.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {f"grad of {name}": grad.detach().clone() for name, grad in found.items()}
