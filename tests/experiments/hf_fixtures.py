"""The reference of the tests against transformers: made once, in an environment that has PyTorch.

A test file imports `reference_fixture`, and its tests take `reference`. They are skipped where no
such environment is; README, "Tests against transformers", says how to make one.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

REPO = pathlib.Path(__file__).parents[2]
SCRIPT = pathlib.Path(__file__).with_name("hf_reference.py")
# The keys of the script's table.
FAMILIES = "llama2 llama3 mistral qwen2 qwen3 gemma2 llama_tied llama_bf16".split()
NO_TORCH = (
    "compares with transformers, which needs `python3 -m venv .torch` and "
    "`.torch/bin/python -m pip install -r tests/torch-requirements.txt` (README says more)"
)
# Where pytest keeps byte code is not where that environment has it.
_NOT_INHERITED = ("PYTHONPYCACHEPREFIX", "PYTHONPATH")


def torch_python() -> str | None:
    """The Python that has PyTorch and transformers, or None."""
    if chosen := os.environ.get("JAXACCEL_TORCH_PYTHON"):
        return chosen
    if (beside := REPO / ".torch/bin/python").exists():
        return str(beside)
    here = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    return sys.executable if here else None


def run_script(command: str, *paths: pathlib.Path) -> None:
    """Runs the script; what it prints is the message of a failure."""
    env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    done = subprocess.run(
        [torch_python(), SCRIPT, command, *paths],
        env=env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{SCRIPT.name} {command} ended with {done.returncode}:\n{done.stdout}")


@dataclasses.dataclass(frozen=True)
class Reference:
    """What transformers made; not to be written to, since other tests read it too."""

    root: pathlib.Path

    def folder(self, family: str) -> pathlib.Path:
        """The model as `save_pretrained` wrote it."""
        return self.root / family

    def version_4(self, family: str) -> pathlib.Path:
        """Its `config.json` as released models have it, with the keys of transformers 4."""
        return self.root / f"{family}.v4.json"

    @functools.cache  # noqa: B019 - one reference a session
    def arrays(self, family: str) -> dict[str, np.ndarray]:
        """What it computes, V = 96 being the vocabulary.

        tokens int32 [2, 24], logits float32 [2, 24, V], loss float32 [] (the mean over the next
        tokens), `grad/NAME` float32 (of each parameter; one that is tied comes once), greedy
        int32 [64] (appended to tokens[0, :8]), train_tokens int32 [10, 4, 24] and losses
        float64 [10] (before each step of AdamW: rate 1e-3, betas 0.9 and 0.95, eps 1e-8, decay
        0.1 on matrices).
        """
        with np.load(self.root / f"{family}.npz", allow_pickle=False) as file:
            return dict(file)

    def load(self, cases: list[tuple[pathlib.Path, np.ndarray]]) -> list[tuple[np.ndarray, dict]]:
        """Has transformers load folders of ours, all at one start of Python.

        Args:
            cases: of each its folder (which is written to) and tokens, int32 [B, T].

        Returns:
            Of each its logits, float32 [B, T, V], and the lists `missing`, `unexpected` and
            `mismatched` of names of tensors.
        """
        for folder, tokens in cases:
            np.save(folder / "tokens.npy", tokens)
        run_script("load", *(folder for folder, _ in cases))
        return [
            (
                np.load(folder / "logits.npy", allow_pickle=False),
                json.loads((folder / "loading.json").read_text()),
            )
            for folder, _ in cases
        ]

    def chat(self, cases: list[dict], scratch: pathlib.Path) -> list[dict]:
        """Chats as ids, by the tokenizers' own templates.

        Args:
            cases: of each the tokenizer's `folder` and the `messages`.
            scratch: a folder to write to.

        Returns:
            Of each its `ids`, and its `mask` (1 where the template says `generation`; None where
            it never does).
        """
        (scratch / "cases.json").write_text(json.dumps(cases, default=str))
        run_script("chat", scratch)
        return json.loads((scratch / "ids.json").read_text())


@pytest.fixture(scope="session", name="reference")
def reference_fixture(tmp_path_factory) -> Reference:
    """The reference, made by the first of the processes and files that ask for it."""
    if torch_python() is None:
        pytest.skip(NO_TORCH)
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent  # what the workers share
    root = session / "hf-reference"
    with open(session / "hf-reference.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileExistsError):
            root.mkdir()
            run_script("make", root)
            (root / "whole").touch()
    if not (root / "whole").exists():
        pytest.fail("the reference failed when another test file asked for it")
    return Reference(root)
