"""One figure of a benchmark: what was measured, against what, and how far repeats lay apart."""

from collections.abc import Sequence
from statistics import median
from typing import Any


def figure(
    name: str,
    unit: str,
    ours: Sequence[float],
    against: str | None = None,
    theirs: Sequence[float] = (),
    *,
    higher_is_better: bool,
    note: str,
) -> dict[str, Any]:
    """The line to print. `ours` and `theirs` hold one number per repeat, taken in turns; `theirs` may be empty.

    `value` and `against_value` are medians; a `ratio` above 1 is in our favour; `spread` is (max - min) / median, of
    the side where it is larger, None where nothing was repeated.
    """
    value = median(ours)
    against_value = median(theirs) if theirs else None
    ratio = None
    if against_value is not None:
        ratio = value / against_value if higher_is_better else against_value / value
    spreads = [(max(side) - min(side)) / median(side) for side in (ours, theirs) if len(side) > 1]
    return {
        "figure": name,
        "value": round(value, 4),
        "unit": unit,
        "against": against if theirs else None,
        "against_value": None if against_value is None else round(against_value, 4),
        "ratio": None if ratio is None else round(ratio, 3),
        "spread": round(max(spreads), 3) if spreads else None,
        "note": note,
    }
