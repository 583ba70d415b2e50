"""One helper with which every config field states its help text, unit and limits where it is defined."""

from typing import Any

from msgspec import Meta


def doc(text: str, unit: str = "", **limits: Any) -> Meta:
    """Metadata of one config field: `lr: Annotated[float, doc("Peak learning rate.", gt=0)] = 1e-6`.

    `text` is the meaning shown by `--help`, `unit` the unit ("tokens", "s", "MiB"; empty if none). `limits` are
    msgspec constraints (`ge`, `gt`, `le`, `lt`, `min_length`, …), checked when the config is read.
    """
    return Meta(description=text, extra={"unit": unit}, **limits)
