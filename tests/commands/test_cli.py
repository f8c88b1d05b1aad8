"""The command line: exit codes, messages, and the small subcommands info, check and heatmap."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import warm

from selfattn_ext import backends, info
from selfattn_ext.arguments import forced_kernel
from selfattn_ext.build import library, sources
from selfattn_ext.commands import check, heatmap
from selfattn_ext.commands.cli import main


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("command", ["", "demo", "info", "check", "bench", "heatmap"])
def test_help_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*command.split(), "--help"])
    assert exit_info.value.code == 0
    assert f"python -m selfattn_ext {command}".strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice"),
        (["demo", "--steps", "0"], "at least 1, got '0'"),
        (["demo", "--steps", "many"], "at least 1, got 'many'"),
        (["demo", "--max-seconds", "nan"], "above 0, got 'nan'"),
        (["demo", "--seed", "-1"], "--seed"),
        (["bench", "--threads", "1,x"], "at least 1, got 'x'"),
        (["check", "--seed", "9" * 30], "2**63 - 1"),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--text", "missing.txt"], "cannot read the text file missing.txt: No such file"),
        (["demo", "--out", "picture.txt"], "--out picture.txt: the name must end in .png or .pdf or .svg"),
        (["demo", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["demo", "--device", "meta"], "device 'meta' cannot be used"),
        (["bench", "--threads", "100000"], "this machine has"),
        (["bench", "--json", "/dev/null/x.json"], "cannot make its folder"),
        (["heatmap", "missing.pt"], "no such file: missing.pt"),
    ],
)
def test_impossible_requests_exit_with_2_before_any_work(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert f"python -m selfattn_ext {arguments[0]}: error:" in printed.err
    assert printed.out == ""


def test_a_library_that_does_not_load_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ImportError("there is no compiled library: pip install .")

    monkeypatch.setattr(library, "extension", fail)
    assert main(["info"]) == 1
    assert "error: there is no compiled library: pip install ." in capsys.readouterr().err


def test_ctrl_c_exits_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(as_json: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupt)
    assert main(["info"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_info_names_versions_features_and_the_chosen_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for expected in (sources.version(), torch.__version__, str(library.extension().__file__), "CUDA"):
        assert expected in printed
    chosen = backends.available()[0]
    assert f"takes {chosen.name}/{chosen.isa}" in printed
    assert all(f"{kernel.name}/{kernel.isa}" in printed for kernel in backends.kernels())


def test_info_prints_the_same_facts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert found["kernels"]["cpu"][0]["name"] == backends.kernels()[0].name
    assert found["problem"] is None
    assert main(["info"]) == 0
    assert capsys.readouterr().out == info.text(found) + "\n"


def test_the_keys_of_info_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = page.partition("| key | holds |")[2].partition("\n\n")[0].splitlines()[2:]
    keys = [key for row in rows for key in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    assert sorted(keys) == sorted(info.report())


def test_info_in_a_process_of_its_own_reports_a_wrong_instruction_set(tmp_path: Path) -> None:
    program = "import runpy, sys; sys.argv = ['', 'info']; runpy.run_module('selfattn_ext', None, '__main__')"
    finished = warm.python(program, tmp_path, warm.variables(SELFATTN_CPU_ISA="sse9"))
    assert finished.returncode == 1, finished.stderr
    assert "no kernel can be chosen" in finished.stdout
    assert "sse9" in finished.stdout


def test_check_passes_for_every_kernel_and_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" ok")]
    kernels = [*backends.available(), *backends.available("cuda")]
    assert len(lines) == sum(len(kernel.dtypes) for kernel in kernels) >= 4 * len(backends.available())
    assert all(" yes " in line for line in lines)


@pytest.fixture
def failures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns what the command says of a case whose results a function has changed."""

    def run(change: Callable[[torch.Tensor], torch.Tensor], name: str = "") -> str:
        case = next(case for case in check.cases(0) if case.name.startswith(name))
        changed = replace(case, name="tampered", ours=lambda **tensors: change(case.ours(**tensors)))
        monkeypatch.setattr(check, "cases", lambda seed: [changed])
        assert main(["check"]) == 1
        return capsys.readouterr().out

    return run


def test_check_fails_where_a_result_is_off(failures: Callable[..., str]) -> None:
    printed = failures(lambda out: out * (1 + 1e-4 if forced_kernel.current() == "loops" else 1.0))
    assert "float32: tampered: forward error" in printed
    assert "float32: tampered: backward error" in printed
    assert "fused" not in printed.partition("failed:")[2]


@pytest.mark.parametrize(
    "name", ["packed sequences", "cache in pages, one token", "cache in pages, a prompt"]
)
def test_check_sees_a_row_in_the_wrong_place(name: str, failures: Callable[..., str]) -> None:
    (case,) = (case for case in check.cases(0) if case.name == name)
    printed = failures(lambda out: out.roll(1, 0), name)
    assert "float32: tampered: forward error" in printed
    assert ("float32: tampered: backward error" in printed) == case.backward


def test_check_fails_where_threads_change_the_result(failures: Callable[..., str]) -> None:
    eps = torch.finfo(torch.float64).eps
    printed = failures(lambda out: out * (1 + 2 * eps * torch.get_num_threads()))
    assert "float64: tampered: one thread and" in printed


def test_check_reports_exceptions_as_failures(failures: Callable[..., str]) -> None:
    def broken(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of order")

    assert "tampered: RuntimeError: out of order" in failures(broken)


@pytest.mark.parametrize(
    ("result", "truth", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([1.0, -math.inf], [1.0, -math.inf], 0.0),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
    ],
)
def test_relative_error_compares_infinities_and_nans_by_place(
    result: list[float], truth: list[float], error: float
) -> None:
    assert check.relative_error(torch.tensor(result), torch.tensor(truth)) == error


def test_heatmap_draws_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new folder" / "example.png"
    assert main(["heatmap", "--out", str(target)]) == 0
    assert is_png(target)
    assert str(target) in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3), (2, 2, 3, 3)])
@pytest.mark.parametrize("kind", ["pt", "npy"])
def test_heatmap_draws_saved_weights(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    weights = torch.rand(shape).softmax(-1)
    source, target = tmp_path / f"weights.{kind}", tmp_path / "drawn.png"
    if kind == "pt":
        torch.save(weights, source)
    else:
        np.save(source, weights.numpy())
    assert main(["heatmap", str(source), "--tokens", "to be or", "--out", str(target)]) == 0
    assert is_png(target)


def test_heatmap_draws_a_list_of_layers_and_one_head_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(
        heatmap.viz, "plot_attention", lambda weights, tokens, title: drawn.append(weights.clone())
    )
    monkeypatch.setattr(heatmap.viz, "save", lambda drawing, path: path)
    layers = [torch.rand(2, 4, 4), torch.rand(3, 4, 4)]
    torch.save(layers, tmp_path / "layers.pt")
    options = ["--layer", "1", "--head", "2", "--out", str(tmp_path / "drawn.png")]
    assert main(["heatmap", str(tmp_path / "layers.pt"), *options]) == 0
    assert torch.equal(drawn[0], layers[1][2])


@pytest.mark.parametrize(
    ("saved", "options", "message"),
    [
        (
            torch.rand(3, 3),
            ["--tokens", "one two"],
            "tokens must have one label for each of 3 positions, got 2",
        ),
        (torch.rand(3), [], "weights must be (L, S)"),
        (torch.rand(3, 3), ["--head", "0"], "the weights have no heads"),
        (torch.rand(2, 3, 3), ["--head", "2"], "--head must lie in 0..1, got 2"),
        (torch.rand(2, 3, 3), ["--layer", "0"], "the weights have no layers"),
        (torch.rand(2, 2, 3, 3), ["--head", "0"], "--head 0 needs --layer too"),
        ({"weights": torch.rand(3, 3)}, [], "holds a dict"),
    ],
)
def test_heatmap_refuses_what_it_cannot_draw(
    saved: object, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "saved.pt", tmp_path / "drawn.png"
    torch.save(saved, source)
    assert main(["heatmap", str(source), *options, "--out", str(target)]) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_heatmap_refuses_files_of_other_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.csv").write_text("1,2")
    (tmp_path / "text.pt").write_text("not a tensor")
    target = str(tmp_path / "drawn.png")
    assert main(["heatmap", str(tmp_path / "text.csv"), "--out", target]) == 2
    assert "expected a file of torch.save" in capsys.readouterr().err
    assert main(["heatmap", str(tmp_path / "text.pt"), "--out", target]) == 2
    assert "text.pt cannot be read" in capsys.readouterr().err


def test_heatmap_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert main(["heatmap", "--out", str(tmp_path / "drawn.png")]) == 1
    assert "pip install 'selfattn_ext[viz]'" in capsys.readouterr().err
