"""Keeps secrets out of the saved config: a run directory is shared and its report is sent around."""

import re
from typing import Any

REDACTED = "(redacted)"
_SECRET = re.compile(r"(token|key|password|passwd|passphrase|secret|credential)s?$", re.IGNORECASE)
# Names that end alike but are settings: dataset columns, special tokens, counts.
_HARMLESS = re.compile(
    r"(^|[_-])(prompt|question|answer|solution|text|message|label|target|input|output|reward|image|sort|group|column"
    r"|pad|eos|bos|unk|sep|cls|mask|stop|special|max|min|new|num|per|think)s?[_-]?(token|key)s?$|^tokens$",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(\w+://)[^/\s:@]*:[^/\s@]+@")


def redact(value: Any, name: str = "") -> Any:
    """A copy of plain config data (dicts, lists, scalars) without its secrets.

    A value goes when its key looks like a token, key or password and it is set (numbers and booleans stay: they are
    limits and switches, except under a password's name). Logins inside URLs go wherever they stand.
    """
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if value is None or value == "" or isinstance(value, bool):
        return value
    if _SECRET.search(name) and not _HARMLESS.search(name):
        is_count = isinstance(value, int | float) and re.search(r"(token|key)s?$", name, re.IGNORECASE)
        return value if is_count else REDACTED
    return _URL_LOGIN.sub(rf"\1{REDACTED}@", value) if isinstance(value, str) else value
