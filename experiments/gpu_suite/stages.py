"""The stages of the GPU suite: which programs, in which order, with how much time.

A stage may use what is left but for what stages after it have in reserve. The sums are for eight
minutes on an H200 with 16 cores; with less time all reserves shrink alike.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from experiments.gpu_suite import records as records
from experiments.gpu_suite.cases import STEPS
from experiments.gpu_suite.run import Part

ROOT = Path(__file__).parents[2]
# Of the kernels' tests, those that the training step needs first.
FIRST = ("attention_mosaic", "attention_mosaic_backward", "cross_entropy", "rms_norm", "swiglu",
         "fp8_matmul", "adam_8bit")  # fmt: skip


@dataclasses.dataclass
class Stage:
    """Programs under one heading, and the time they may have."""

    name: str
    parts: list[Part]
    reserve: float  # seconds that stages before it leave to it
    cap: float  # seconds at most
    at_once: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    variants: tuple[str, ...] = ()  # ways to go on after a failure that have not been tried
    seconds: float = 0.0
    card: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def status(self) -> str:
        """Of all parts, the worst."""
        found = [part.status for part in self.parts]
        return next((s for s in found if s != "ok"), "ok")

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        own = {k: getattr(self, k) for k in ("name", "status", "seconds", "card", "environment")}
        return own | {"parts": [part.plain() for part in self.parts]}


def child(*words: str, fake: bool, item_box: float = 120.0) -> Part:
    """A part that is one of our own programs."""
    command = [sys.executable, "-m", "experiments.gpu_suite.child", *words]
    return Part("-".join(words), command + ["--fake"] * fake, item_box)


def parts_of_tests(fake: bool) -> list[Part]:
    """A part for each file with tests for a GPU; in a fake run, a test in the simulator."""
    marked = [p for p in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in p.read_text("utf-8")]
    stem = lambda path: path.stem.removeprefix("test_").removesuffix("_mosaic")
    order = [name.removesuffix("_mosaic") for name in FIRST]
    place = lambda path: order.index(stem(path)) if stem(path) in order else len(order)
    chosen = [("gpu", path, ()) for path in sorted(marked, key=lambda p: (place(p), str(p)))]
    if fake:
        path = ROOT / "tests/pallas_kernels/test_swiglu.py"
        chosen = [("not target", path, ("-k", "test_simulated and shape0"))]
    options = ("-q", "--tb=short", "-o", "addopts=", "-o", "filterwarnings=default",
               "-p", "no:cacheprovider", "-p", "experiments.gpu_suite.pytest_plugin")  # fmt: skip
    return [
        Part(
            path.stem,
            [
                *(sys.executable, "-m", "pytest", "-m", marks, str(path.relative_to(ROOT))),
                *options,
                *more,
            ],
            item_box=45.0,
            # Other packages' plugins are no part of this; their warnings no failure.
            environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        for marks, path, more in chosen
    ]


def stages(fake: bool, alone: bool = False) -> list[Stage]:
    """All stages in order; `alone`: the card takes one process at a time."""
    few = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    most = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    # Tests are not timed: while one file compiles, others run. Some memory for each.
    at_once = 1 if fake or alone else max(1, min(4, (os.cpu_count() or 1) // 4))
    tests = Stage("tests", parts_of_tests(fake), 60, 120, at_once, few)
    train = [
        Stage(f"train {case}", [child("train", case, fake=fake)], 65, 150, 1, most, ("first",))
        for case in STEPS
        if not fake or case != "fp8"  # the full stack has all of it
    ]
    plain = Part("train-bf16-no-kernels", train[0].parts[0].command)
    plain = Stage("train bf16, no kernels", [plain], 0, 150, 1, most | {records.KERNELS: "off"})
    attention = Stage("attention", [child("attention", fake=fake)], 25, 75)
    return [
        tests,
        Stage("kernels", [child("kernels", fake=fake)], 25, 75),
        attention,
        *train[:-1],
        Stage("decode", [child("decode", fake=fake)], 40, 75, 1, most),
        train[-1],
        # What the kernels gain, and whether they compute the same; if time is left.
        *([] if fake else [plain]),
    ]
