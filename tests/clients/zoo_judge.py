"""The judge of the zoo: an architecture on our attention against itself on eager attention."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
import zoo_inputs
import zoo_models
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor
from zoo_inputs import Inputs
from zoo_models import NotBuilt, last_line

from selfattn_ext.integrations import transformers as integration

NAME = "selfattn_ext"
TOLERANCE = 2e-4
STEPS = 4

#: Architectures whose judge is not "eager" throughout, because "eager" itself is wrong there.
AS_SDPA: dict[str, dict[str, str]] = {
    # Their text models get a bool mask, which "eager" adds to the scores as 0 and 1.
    "grounding-dino": {"": "eager", "text_config": "sdpa", "backbone_config": "eager"},
    "mm-grounding-dino": {"": "eager", "text_config": "sdpa", "backbone_config": "eager"},
}


@dataclasses.dataclass
class Verdict:
    """The result of judging one architecture."""

    model_type: str
    outcome: str = "not built"
    model: str = ""
    checks: dict[str, str] = dataclasses.field(default_factory=dict)
    worst: float = 0.0
    calls: int = 0
    softmaxes: tuple[int, int] = (0, 0)
    generates: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)

    def line(self) -> str:
        bad = "; ".join(f"{name}: {text}" for name, text in self.checks.items() if text != "equal")
        good = ",".join(name for name, text in self.checks.items() if text == "equal")
        return (
            f"{self.outcome:11s} {self.model_type} [{self.model}] ok: {good or '-'} | {bad or '-'} |"
            f" worst {self.worst:.1e} calls {self.calls} softmax {self.softmaxes} {'; '.join(self.notes)}"
        )


class Counter(TorchDispatchMode):
    """Counts calls of our operators, and calls of torch's own softmax and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = self.softmaxes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "selfattn":
            self.ours += 1
        elif (
            func.__name__.startswith(("_softmax.", "_safe_softmax.")) and _is_attention(args[0])
        ) or "scaled_dot_product" in func.__name__:
            self.softmaxes += 1
        return func(*args, **(kwargs or {}))


def _is_attention(scores: Tensor) -> bool:
    """Says whether a softmax is over keys, and not over experts."""
    return scores.dim() >= 4 or (scores.dim() == 3 and scores.shape[0] > zoo_inputs.BATCH)


def tensors(result: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        if result.dtype.is_floating_point:
            yield path, result.detach()
    elif isinstance(result, dict):
        for name, one in result.items():
            if name != "past_key_values" and "cache" not in name:
                yield from tensors(one, f"{path}.{name}" if path else str(name))
    elif isinstance(result, (list, tuple)):
        for index, one in enumerate(result):
            yield from tensors(one, f"{path}[{index}]")


def run(model: nn.Module, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(5)
    with torch.no_grad():
        return dict(tensors(model(**copy.deepcopy(inputs), **options)))


def difference(ours: Tensor, eager: Tensor, rows: Tensor | None = None) -> float:
    """Returns the largest difference in the chosen rows, relative to the largest number (at least 1)."""
    if ours.shape != eager.shape:
        return float("inf")
    if eager.numel() == 0:
        return 0.0
    finite = eager.isfinite()
    if rows is not None:
        finite = finite & rows
    scale = float(eager[finite].abs().max()) if bool(finite.any()) else 1.0
    apart = (ours - eager)[finite].abs()
    if apart.numel() == 0:
        return 0.0
    if bool(apart.isnan().any()):
        return float("inf")
    return float(apart.max()) / max(scale, 1.0)


def unaffected_rows(eager: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """Says which rows of each result do not change with the hidden tokens.

    The other rows are padding: a query that sees no key has output 0 on our attention, and the mean of all
    values on eager attention.
    """
    rows: dict[str, Tensor] = {}
    for name, result in eager.items():
        if name not in other or other[name].shape != result.shape:
            continue
        apart = (result - other[name]).abs().nan_to_num(0.0)
        apart = apart.amax(-1, keepdim=True) if apart.dim() > 1 else apart
        rows[name] = (apart <= 1e-5 * result.abs().nan_to_num(0.0).max().clamp(min=1)).expand(result.shape)
    return rows


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Forces the same tokens on every model, so that a tie does not make two models diverge."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 7 + ids.shape[1] % 5] = 0.0
        return forced


def is_refusal(error: BaseException) -> bool:
    text = str(error)
    words = (NAME, "attn_implementation", "attention implementation", "PositionalMask", "eager")
    return (
        isinstance(error, (ValueError, ImportError, NotImplementedError, TypeError, RuntimeError))
        and any(word in text for word in words)
        and not isinstance(error, KeyError)
    )


class Judge:
    def __init__(self, model_type: str) -> None:
        self.verdict = Verdict(model_type)
        self.eager: nn.Module
        self.ours: nn.Module
        self.inputs: Inputs

    def __call__(self) -> Verdict:
        try:
            self.build()
        except NotBuilt as error:
            self.verdict.notes.append(str(error))
            return self.verdict
        if "build" not in self.verdict.checks:
            self.forward()
            if self.verdict.calls or self.verdict.softmaxes[0]:
                self.padding()
                self.attentions()
                self.generation()
        self.verdict.outcome = self.outcome()
        return self.verdict

    def build(self) -> None:
        kinds = zoo_models.kinds(zoo_models.configuration_auto.CONFIG_MAPPING[self.verdict.model_type])
        if not kinds:
            raise NotBuilt("no model of its own")
        reasons = []
        for wide in (False, True):
            for kind in kinds[:3]:
                try:
                    config = zoo_models.small_config(self.verdict.model_type, wide)
                    zoo_models.refuse_large(kind, config)
                    self.eager = zoo_models.built(copy.deepcopy(config), kind, "eager")
                except Exception as error:
                    reasons.append(f"{kind.__name__}: {last_line(error)}")
                    continue
                reason = self.find_inputs()
                if reason:
                    reasons.append(f"{kind.__name__} inputs: {reason}")
                    continue
                self.verdict.model = kind.__name__ + (" (wide)" if wide else "")
                break
            else:
                continue
            break
        else:
            raise NotBuilt(" // ".join(dict.fromkeys(reasons)))
        try:
            if self.verdict.model_type in AS_SDPA:
                self.eager = zoo_models.built(copy.deepcopy(config), kind, AS_SDPA[self.verdict.model_type])
            self.ours = zoo_models.built(copy.deepcopy(config), kind, NAME)
            for model in (self.eager, self.ours):
                generation = getattr(model, "generation_config", None)
                if generation is not None:
                    generation.bos_token_id = 1
                    generation.pad_token_id = 0
                    if getattr(generation, "decoder_start_token_id", None) is None:
                        generation.decoder_start_token_id = 1
            self.ours.load_state_dict(self.eager.state_dict())
            buffers = dict(self.eager.named_buffers())
            for name, buffer in self.ours.named_buffers():
                buffer.copy_(buffers[name])
        except Exception as error:
            self.verdict.checks["build"] = self.told(error)

    def find_inputs(self) -> str:
        """Sets the inputs that eager attention takes, or returns why there are none."""
        reasons: list[str] = []
        for inputs in zoo_inputs.candidates(self.eager):
            try:
                found = run(self.eager, inputs)
            except Exception as error:
                reasons.append(f"({','.join(inputs)}) {last_line(error)}")
                continue
            if not found:
                reasons.append("no tensors come out")
                continue
            self.inputs = inputs
            return ""
        return " / ".join(list(dict.fromkeys(reasons))[:3]) or "none known"

    def told(self, error: BaseException) -> str:
        return ("refused: " if is_refusal(error) else "crash: ") + last_line(error)

    def compare(
        self,
        check: str,
        call: Callable[[nn.Module], dict[str, Tensor]],
        other: Callable[[nn.Module], dict[str, Tensor]] | None = None,
    ) -> dict[str, Tensor] | None:
        """Judges one call; ``other`` is the same call with other hidden tokens."""
        counter = Counter()
        try:
            with counter:
                eager = call(self.eager)
        except Exception as error:
            self.verdict.notes.append(f"eager cannot {check}: {last_line(error)[:80]}")
            return None
        softmaxes = counter.softmaxes
        counter = Counter()
        try:
            with counter:
                ours = call(self.ours)
        except Exception as error:
            self.verdict.checks[check] = self.told(error)
            return eager
        self.verdict.calls += counter.ours
        if check != "attentions":  # a model may compute attentions by the formula
            before = self.verdict.softmaxes
            self.verdict.softmaxes = (before[0] + softmaxes, before[1] + counter.softmaxes)
        missing = sorted(set(eager) - set(ours))
        if check != "attentions":  # eager may return attentions without being asked
            missing = [name for name in missing if "attentions" not in name]
        shared = [name for name in eager if name in ours]
        apart = {name: difference(ours[name], eager[name]) for name in shared}
        if other is not None and max(apart.values(), default=0.0) > TOLERANCE:
            rows = unaffected_rows(eager, other(self.eager))
            apart = {name: difference(ours[name], eager[name], rows[name]) for name in rows}
        worst = max(apart, key=lambda name: apart[name], default="")
        size = apart.get(worst, 0.0)
        if size > TOLERANCE:
            floor = self.noise(call, eager, worst)
            if size <= 20 * floor:
                self.verdict.notes.append(
                    f"{check}: chaotic, {size:.1e} where rounding alone makes {floor:.1e}"
                )
                size = 0.0
        self.verdict.worst = max(self.verdict.worst, size)
        if size > TOLERANCE:
            self.verdict.checks[check] = f"wrong: {worst} differs by {size:.1e}"
        elif missing:
            self.verdict.checks[check] = f"missing: {', '.join(missing)[:100]}"
        else:
            self.verdict.checks[check] = "equal"
        return eager

    def noise(
        self, call: Callable[[nn.Module], dict[str, Tensor]], eager: dict[str, Tensor], name: str
    ) -> float:
        """Returns how far eager attention is from itself if the weights are rounded differently."""
        generator = torch.Generator().manual_seed(9)
        shaken = copy.deepcopy(self.eager)
        with torch.no_grad():
            for parameter in shaken.parameters():
                parameter.mul_(1 + 2e-7 * torch.randn(parameter.shape, generator=generator))
        try:
            found = call(shaken)
        except Exception:
            return 0.0
        return difference(found[name], eager[name]) if name in found else 0.0

    def forward(self) -> None:
        self.compare("forward", lambda model: run(model, self.inputs))

    def padding(self) -> None:
        for check, given, other in zoo_inputs.padded(self.inputs, zoo_inputs.parameters(self.eager)):
            self.compare(
                check,
                lambda model, given=given: run(model, given),
                None if other is None else lambda model, other=other: run(model, other),
            )

    def attentions(self) -> None:
        def weights(model: nn.Module) -> dict[str, Tensor]:
            found = run(model, self.inputs, output_attentions=True)
            return {name: one for name, one in found.items() if "attentions" in name}

        try:
            if not weights(self.eager):
                return
        except Exception:
            return
        self.compare("attentions", weights)

    def generation(self) -> None:
        if not (hasattr(self.eager, "can_generate") and self.eager.can_generate()):
            return
        paddings = zoo_inputs.padded(self.inputs, zoo_inputs.parameters(self.eager))
        _, given, other = next(paddings, ("", self.inputs, None))
        for cache in ("dynamic", "static"):
            options = {} if cache == "dynamic" else {"cache_implementation": "static"}

            def generate(
                model: nn.Module, given: Inputs = given, options: Any = options
            ) -> dict[str, Tensor]:
                torch.manual_seed(5)
                prompt = {name: one for name, one in given.items() if not name.startswith("decoder_")}
                with torch.no_grad():
                    found = model.generate(
                        **copy.deepcopy(prompt),
                        max_new_tokens=STEPS,
                        min_new_tokens=STEPS,
                        do_sample=False,
                        num_beams=1,
                        output_logits=True,
                        logits_processor=[Forced()],
                        return_dict_in_generate=True,
                        **options,
                    )
                logits = getattr(found, "logits", None)
                if logits is None:
                    return dict(tensors(found))
                return {f"step {step}": one for step, one in enumerate(logits)}

            check = f"generate {cache}"
            self.compare(check, generate, None if other is None else lambda model: generate(model, other))
            self.verdict.generates |= check in self.verdict.checks

    def outcome(self) -> str:
        told = {text.split(":")[0] for text in self.verdict.checks.values()}
        for worst in ("wrong", "crash"):
            if worst in told:
                return worst
        if told == {"refused"}:
            return "refused"
        if not told:
            self.verdict.notes.append("nothing could be compared")
            return "not built"
        if self.verdict.calls == 0:
            return "eager" if self.verdict.softmaxes[0] else "no attention"
        if told - {"equal"} or self.verdict.softmaxes[1]:
            return "in part"
        return "served"


def judged(model_type: str) -> Verdict:
    """Registers our attention and returns the verdict on an architecture."""
    integration.register(NAME)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Judge(model_type)()
