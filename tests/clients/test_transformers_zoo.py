"""Every architecture of the installed transformers is right on our attention, or refused.

`python scripts/transformers_table.py` judges the same architectures, and writes
docs/transformers-architectures.md.
"""

from __future__ import annotations

import pytest
import transformers
import turns

if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("the zoo needs the configurations of transformers 5", allow_module_level=True)

import zoo_judge
import zoo_models
from transformers import AttentionInterface

from selfattn_ext.integrations import transformers as integration

#: The number of turns of .ci/run that together judge all architectures.
TURNS = 5
ARCHITECTURES = [
    pytest.param(name, marks=turns.only_in(number % TURNS, TURNS))
    for number, name in enumerate(zoo_models.architectures())
]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_right_or_refused(model_type: str) -> None:
    verdict = zoo_judge.judged(model_type)
    assert verdict.outcome not in ("wrong", "crash"), verdict.line()
    if verdict.outcome == "not built":
        pytest.skip(verdict.notes[0] if verdict.notes else "nothing to compare")


@pytest.mark.parametrize(
    "model_type", ["llama", "bert", "t5", "whisper", "gpt_oss", "qwen2_vl", "clip", "vit", "mamba"]
)
def test_the_walk_reaches(model_type: str) -> None:
    """These architectures must not silently drop out of the list."""
    verdict = zoo_judge.judged(model_type)
    assert verdict.outcome == ("no attention" if model_type == "mamba" else "served"), verdict.line()
    assert verdict.generates == (model_type not in ("clip", "vit", "mamba"))


def test_a_wrong_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge notices if attention is not causal, and if it sees padding."""
    seeing = integration.attention_forward

    def blind(module, query, key, value, attention_mask, **more):  # type: ignore[no-untyped-def]
        return seeing(module, query, key, value, None, is_causal=False, **more)

    monkeypatch.setattr(integration, "attention_forward", blind)
    monkeypatch.setitem(AttentionInterface._global_mapping, zoo_judge.NAME, blind)
    verdict = zoo_judge.judged("llama")
    assert verdict.outcome == "wrong"
    assert all("wrong" in verdict.checks[check] for check in ("forward", "left padding", "generate dynamic"))
