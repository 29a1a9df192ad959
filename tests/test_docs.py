"""The documentation: options of its commands are legal, its code runs, its links lead somewhere.

What is compiled or trained by a command takes minutes, and is run as it stands by `pytest -m slow
tests/test_docs.py`, in order, in a copy of the repository; the rest of this file is for every run.
"""

import argparse
import dataclasses
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments import cli
from experiments.config import TrainConfig, check_options
from jaxaccel import sharding, target

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(path.relative_to(ROOT) for path in ROOT.glob("[a-z]*/*.md")), Path("README.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# With these words in it a command is for a GPU or a cluster, and asked for its help only.
ELSEWHERE = (
    "gpu_suite",
    "bench.attention",
    "bench.kernels",
    "pallas_kernels.tune",
    "llama-8b --run-dir",
)
PLACEHOLDERS = ("FOLDER", "chats.jsonl")


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for kind, text in BLOCK.findall((ROOT / page).read_text()) if kind in languages]


class Command(NamedTuple):
    page: Path
    module: str
    args: list[str]
    devices: int


def commands() -> list[Command]:
    """All lines that start a module of ours, in blocks and in running text."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        lines = "\n".join(blocks(page, "sh", "bash")).replace("\\\n", " ").splitlines()
        lines += re.findall(r"`(python -m [^`]+)`", text.replace("\n", " "))
        lines += re.findall(r"^    (python -m .+)$", text, re.MULTILINE)
        flags = 1
        for line in lines:
            count = re.search(r"host_platform_device_count=(\d+)", line)
            flags = int(count[1]) if count else 1 if line.startswith("python") else flags
            module = re.search(r"python -m ((?:experiments|pallas_kernels)\.\S+)(.*)", line)
            if module:
                rest = re.sub(r"\$\w+", "0", module[2].split(" &")[0].split(";")[0])
                found.append(Command(page, module[1], shlex.split(rest), flags))
    return found


class Parsed(Exception):
    """A program's options were read, and are legal as far as they can be known."""

    def __init__(self, options: Any):
        self.options = options


@pytest.fixture
def parse_only(monkeypatch):
    """Programs stop once they have read their options."""

    def stop(read):
        def parse(*args, **kwargs):
            raise Parsed(read(*args, **kwargs))

        return parse

    monkeypatch.setattr(cli, "parse", stop(cli.parse))
    read = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop(read))
    monkeypatch.setattr(cli, "use_compilation_cache", lambda: None)
    # Or code with type checks in it, as tests have it, would be kept where users' programs look.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_there_are_commands_on_every_page():
    assert {command.page for command in commands()} == {
        p for p in PAGES if p.parts[0] != "jaxaccel"
    }
    assert len(commands()) > 50


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_options_are_legal(page, parse_only, monkeypatch, capsys):
    for command in (c for c in commands() if c.page == page):
        monkeypatch.setattr(sys, "argv", [command.module, *command.args])
        words = f"{command.module} {shlex.join(command.args)}"
        if "..." in words:
            continue
        try:
            runpy.run_module(command.module, run_name="__main__")
            raise AssertionError(f"{words}: no options were read")
        except Parsed as parsed:
            options = parsed.options
        except SystemExit as stop:
            if stop.code:
                pytest.fail(f"{words}: {capsys.readouterr().err}")
            continue  # --help
        if isinstance(options, TrainConfig):
            count = command.devices
            if where := getattr(options, "target", None):  # a plan
                count = target.parse(where).count
            elif "llama-8b" in command.args and options.mesh:
                count = 16  # GPUs of the cluster that the page is about
            options = dataclasses.replace(options, precision="bfloat16")  # auto, on a GPU
            check_options(options, sharding.parse_mesh(options.mesh, count))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=str)
def test_code_runs(page, tmp_path):
    """Each block by itself, as a reader would paste it."""
    code = "\n".join(f"exec({text!r}, {{}})" for text in blocks(page, "python"))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        timeout=300, env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    text = BLOCK.sub("", (ROOT / page).read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    anchor = lambda title: re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    for link in links:
        if link.startswith("http"):
            continue
        name, _, place = link.partition("#")
        there = ROOT / page.parent / name if name else ROOT / page
        assert there.exists(), f"{page}: {link}"
        if place:
            titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", there.read_text()), re.MULTILINE)
            assert place in map(anchor, titles), f"{page}: {link}"


def test_the_layers_of_the_readme_are_the_enforced_ones():
    """Row by row from above; within a row `above` separates layers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    enforced = project["tool"]["importlinter"]["contracts"][0]["layers"]
    table = (ROOT / "README.md").read_text().split("| row | modules |")[1].split("\n\n")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    stated = [part for row in rows for part in re.split(r",? above ", row)]
    names = lambda text: {name.split(".")[-1] for name in re.findall(r"`([\w.]+)", text)}
    place = {name: index for index, part in enumerate(stated) for name in names(part)}
    last = -1
    for layer in enforced[1:-1]:  # between programs and kernels
        modules = [module.strip().split(".")[-1] for module in layer.split("|")]
        places = {place[module] for module in modules}  # each has a place
        assert len(places) == 1 and min(places) >= last, f"{layer}: {sorted(places)} after {last}"
        last = max(places)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_run_as_they_stand(page, tmp_path):
    """Block by block in the page's order; what needs a GPU or a cluster shows its help."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".torch", "runs", ".git"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(copy)}
    del environment["XLA_FLAGS"]  # the tests' eight devices
    for block in blocks(page, "sh"):
        if "pytest" in block or ("pip install" in block and "experiments" not in block):
            continue  # CI runs it, or it installs
        lines = []
        for line in block.replace("\\\n", " ").splitlines():
            elsewhere = any(word in line for word in (*ELSEWHERE, *PLACEHOLDERS[:1]))
            is_command = line.lstrip().startswith("python")
            words = line.split(" -m ")[-1].split()
            lines.append(f"python -m {words[0]} --help" if elsewhere and is_command else line)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(lines)], cwd=copy, env=environment,
            capture_output=True, text=True, timeout=3600,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
