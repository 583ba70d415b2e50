"""A probe (trainer/probe.py) as people read it: a table on the console, a table and a picture in the report.

A probe is one line of probes.jsonl: {"step", "time", "arms": [{"label", "kl", "low", "high"}], "sources": [the same and
"name", "open"], "absent": {source: why}, "groups", "tokens", "confidence"}; KL in nats.
"""

from collections.abc import Mapping, Sequence
from typing import Any

HEADS = ("", "KL, nats", "interval", "in this run")


def title(probe: Mapping[str, Any]) -> str:
    size = f"{probe['tokens']:,} tokens of {probe['groups']} prompts"
    return f"where the mismatch comes from: step {probe['step']}, {size}, {probe['confidence']:.0%} intervals"


def table(probe: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The rows under `HEADS`: the arms, what every source adds, the sources that the run does not have."""
    rows = [(arm["label"], f"{arm['kl']:.2e}", _interval(arm), "") for arm in probe["arms"]]
    rows += [
        (f"+ {source['label']}", f"{source['kl']:+.2e}", _interval(source), "open" if source["open"] else "matched")
        for source in probe["sources"]
    ]
    return rows + [(f"+ {name}", "–", "", why) for name, why in probe["absent"].items()]


def attribution_section(probes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the page shows of the last probe; None where there was none."""
    if not probes:
        return None
    last = probes[-1]
    bars = [*last["sources"], *({**arm, "name": arm["label"]} for arm in last["arms"])]
    return {
        "title": title(last), "heads": HEADS, "rows": table(last),
        "bars": [
            {"label": bar["label"], "kl": bar["kl"], "up": bar["high"] - bar["kl"], "down": bar["kl"] - bar["low"],
             "kind": "source" if "open" in bar else "arm"}
            for bar in reversed(bars)
        ],
    }  # fmt: skip


def _interval(row: Mapping[str, Any]) -> str:
    return f"{row['low']:.2e} … {row['high']:.2e}"
