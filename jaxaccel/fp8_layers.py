"""Which layers of a model multiply in FP8, and why the others do not."""

import fnmatch
from collections.abc import Mapping, Sequence


def choose(shapes: Mapping[str, Sequence[int]], patterns: str = "*") -> dict[str, str]:
    """Which linear layers to convert, and why not the others.

    Args:
      shapes: of each layer's weight, by name.
      patterns: shell patterns, comma-separated; a name that matches one of them is asked for.

    Returns:
      By name: "" for a layer that is to be converted, else the reason why it is not.

    Raises:
      ValueError: a pattern that matches no name, or no layer is left; lists the reasons.

    Example:
      >>> choose({"up": (32, 64), "gate": (32, 60), "query": (32, 32)}, "up,gate")
      {'up': '', 'gate': '60 is no multiple of 16', 'query': 'not asked for'}
    """
    asked = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in asked:
        if not fnmatch.filter(shapes, pattern):
            raise ValueError(
                f"FP8 for {pattern!r}: there is no such layer; layers: {', '.join(shapes)}"
            )
    reasons = {}
    for name, shape in shapes.items():
        odd = sorted({size for size in shape if size % 16})
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in asked):
            reasons[name] = "not asked for"
        elif len(shape) < 2:
            reasons[name] = "no matrix"
        elif odd:  # XLA would pad each operand, at the cost of a copy
            verb = "is" if len(odd) == 1 else "are"
            reasons[name] = f"{' and '.join(map(str, odd))} {verb} no multiple of 16"
        else:
            reasons[name] = ""
    if all(reasons.values()):
        found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"no layer for FP8 in {patterns!r}: {found}")
    return reasons
