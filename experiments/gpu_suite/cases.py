"""Names of what the GPU suite runs, for the programs that run it and for the one that reports."""

from pathlib import Path
from typing import Any

# Training steps: FP8 recipe, optimizer.
STEPS: dict[str, tuple[Any, Any]] = {
    "bf16": ("off", "adamw"),
    "fp8": ("delayed", "adamw"),
    "full-stack": ("delayed", "adamw-8bit"),
}
# Decoding: rows, drafts of a pass.
DECODE = {
    "plain": (1, 0),
    "speculative, 1 draft": (1, 1),
    "plain, 8 rows": (8, 0),
    "speculative, 3 drafts": (1, 3),
}
TARGETS = ("h200", "h100")  # of the plan
PLAN = Path(__file__).parents[1] / "results" / "gpu_suite_plan.json"
FAKE = "FAKE RUN ON A CPU: NOTHING HERE IS A GPU FIGURE"
