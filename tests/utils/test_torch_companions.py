"""A torchvision for CUDA beside a torch for CPUs breaks a job: said in one line before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl.trainer.config.cli import run_hydra
from verl.utils.config import ConfigError
from verl.utils.torch_companions import COMPANIONS, remedy, require_loadable, unloadable

BREAKS = "raise OSError('Could not load this library')"
LACKS_FFMPEG = "raise RuntimeError('Could not load libtorchcodec')"
ENDS_ITS_PROCESS = "import os; os.abort()"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package of that name beside a torch for CPUs, for this process and those that it starts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def install(name: str, source: str, build: str = "") -> None:
        metadata = tmp_path / f"{name}-0.28.0{build}.dist-info" / "METADATA"
        for file, text in (
            (metadata, f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.28.0{build}\n"),
            (tmp_path / name / "__init__.py", source),
        ):
            file.parent.mkdir()
            file.write_text(text)

    torch = tmp_path / "torch-2.13.0+cpu.dist-info" / "METADATA"
    torch.parent.mkdir()
    torch.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    return install


def test_an_environment_without_them_is_good():
    assert unloadable() == []
    require_loadable()


def test_one_that_loads_is_good_whatever_it_was_built_for(installed):
    installed("torchvision", "")
    assert unloadable() == []


def test_those_that_do_not_load_are_named_with_what_takes_them_out(installed):
    for name in COMPANIONS:
        installed(name, BREAKS)
    assert unloadable() == list(COMPANIONS)
    with pytest.raises(ConfigError, match=r"torchvision 0\.28\.0, .* pip uninstall .*torchaudio torchcodec$"):
        require_loadable()


def test_saying_what_takes_them_out_leaves_this_process_as_it_was(installed):
    """setuptools gives up its distutils, which it asserts to be there, in a process that looks for the module pip."""
    hooks = [vars(finder).copy() for finder in sys.meta_path if hasattr(finder, "__dict__")]
    assert "torchvision" in remedy(["torchvision"])
    assert [vars(finder) for finder in sys.meta_path if hasattr(finder, "__dict__")] == hooks


def test_one_that_ends_its_process_does_not_end_this_one(installed):
    installed("torchvision", ENDS_ITS_PROCESS)
    assert "torchvision" in unloadable()


@pytest.mark.parametrize("name", COMPANIONS)
def test_any_one_of_them_keeps_a_job_from_starting(name, installed):
    installed(name, BREAKS)
    with pytest.raises(ConfigError, match=rf"{name} 0\.28\.0"):
        require_loadable()


def test_a_torchcodec_without_ffmpeg_is_one_that_vllm_goes_on_without(installed):
    installed("torchcodec", LACKS_FFMPEG)
    assert unloadable() == []


def test_one_for_this_build_of_torch_is_not_imported(installed):
    installed("torchvision", BREAKS, build="+cpu")
    assert unloadable() == []


@pytest.mark.parametrize("argv", [[], ["--check"]])
def test_the_command_says_so_in_one_line(argv, installed, capsys: pytest.CaptureFixture[str]):
    installed("torchvision", BREAKS)
    begun = []
    with pytest.raises(SystemExit) as caught:
        run_hydra(begun.append, argv)
    told = capsys.readouterr().err
    assert (caught.value.code, begun, told.count("\n")) == (2, [], 1)
    assert told.startswith("error: not built for torch")
