"""The tiles of attention's kernels: one small table, looked up while tracing, never searched.

`tiles.json` has a row for each (family of GPUs, kernel, head sizes, kind of mask); the program
`python -m pallas_kernels.tune` measures rows on a GPU and writes them. A kernel that is not in
the table for its mask has a rule of its own: `choose` in `mosaic_forward.py` and
`mosaic_backward.py`. What was chosen by registers and shared memory, not by time, says
`"measured": null`.

Legend: D key size, E value size, padded to multiples of 64.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.attention.mask import MaskArrays
from pallas_kernels.attention.xla import Options

PATH = Path(__file__).with_name("tiles.json")
FAMILY = "hopper"  # the only one that the kernels are for
ANY = "any"  # masks without a row of their own; the backward pass: and without a cap


class Key(NamedTuple):
    """What tiles are chosen by."""

    gpu: str
    kernel: str
    D: int
    E: int
    mask: str  # of `kind`, or `ANY`


Table = dict[Key, dict[str, Any]]  # values: "tiles", the fields of a kernel's Tiles; "measured"


def read(path: Path = PATH) -> Table:
    """The table in a file."""
    rows = json.loads(path.read_text())
    return {Key(*(row.pop(field) for field in Key._fields)): row for row in rows}


def write(table: Table, path: Path = PATH) -> None:
    """Replaces the file, a row a line, sorted."""
    rows = [json.dumps(key._asdict() | table[key]) for key in sorted(table)]
    path.write_text("[\n " + ",\n ".join(rows) + "\n]\n")


TABLE = read()


def find(kernel: str, D: int, E: int, *masks: str | None) -> dict[str, int] | None:
    """The tiles of the first of some kinds of masks that has a row."""
    rows = (TABLE.get(Key(FAMILY, kernel, D, E, mask)) for mask in masks if mask is not None)
    return next((row["tiles"] for row in rows if row), None)


def kind(options: Options, mask: MaskArrays) -> str:
    """The kind of a mask, as far as a kernel has different code for it.

    Returns:
      "full", "causal", "window" or "packed"; with ", cap" where logits have a soft cap.
    """
    band = options.band
    if mask.q_segments is not None:
        name = "packed"
    elif band.left is not None or band.right not in (None, 0):
        name = "window"
    else:
        name = "full" if band.right is None else "causal"
    return name if options.soft_cap is None else f"{name}, cap"
