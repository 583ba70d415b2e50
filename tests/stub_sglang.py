"""Stands in for SGLang in an engine's child, so that the child itself can be tested in a second instead of thirty.

`install(directory)` writes a module `sglang` there; a child with `directory` and this one on PYTHONPATH imports it. It
writes a line of JSON to $STUB_LOG for everything it is told, and samples without a model: the first token of a prompt
says how many hundredths of a second it takes, and what comes out is how many requests ran meanwhile at most.
"""

import asyncio
import json
import os
import pickle
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec

__version__ = "stub"
SOURCE = "import sys\nfrom stub_sglang import Engine, __version__, modules\nsys.modules.update(modules())\n"


def install(directory: Path, monkeypatch) -> Path:
    """The path of the log."""
    (directory / "sglang.py").write_text(SOURCE)
    tests = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (directory, tests, tests.parent))))
    monkeypatch.setenv("STUB_LOG", str(directory / "stub.log"))
    return directory / "stub.log"


def told(log: Path) -> list[list]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def tell(*what) -> None:
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(json.dumps(what) + "\n")


class Requests:
    """SGLang's request structs: whatever they are called, they keep their arguments."""

    def __getattr__(self, name):
        return SimpleNamespace


class Engine:
    def __init__(self, **arguments):
        tell("start", arguments["tp_size"])
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = Manager(arguments["tp_size"])

    def shutdown(self):
        tell("shutdown")


class Manager:
    def __init__(self, processes):
        self.server_args = SimpleNamespace(tp_size=processes)
        self.version, self.running = "", set()

    async def begin_weight_update(self, request):
        tell("begin")
        return True, ""

    async def update_weights_from_tensor(self, request):
        from engine.hotswap import Command, Reply

        self.version = request.weight_version
        for process, payload in enumerate(request.serialized_named_tensors):
            ((text, _),) = pickle.loads(payload)
            command = msgspec.msgpack.decode(text.encode("latin-1"), type=Command)
            fields = {key: value for key, value in msgspec.to_builtins(command).items() if key not in ("type", "reply")}
            tell(type(command).__name__, process, fields)
            Path(command.reply).write_bytes(msgspec.msgpack.encode(Reply(verified=7 + process)))
        return True, ""

    async def end_weight_update(self, request):
        tell("end")
        return True, ""

    async def flush_cache(self):
        return SimpleNamespace(success=True)

    async def release_memory_occupation(self, request):
        tell("release", request.tags)

    async def resume_memory_occupation(self, request):
        tell("resume", request.tags)

    async def generate_request(self, request, _):
        self.running.add(id(request))
        most = len(self.running)
        for _ in range(request.input_ids[0]):
            await asyncio.sleep(0.01)
            most = max(most, len(self.running))
        self.running.remove(id(request))
        tell("generated", request.input_ids)
        meta = {"weight_version": self.version, "output_token_logprobs": [(-1.0, most, None)]}
        yield {"output_ids": [most], "meta_info": meta | {"finish_reason": {"type": "stop"}}}

    def abort_request(self, abort_all):
        tell("abort")


def modules() -> dict[str, ModuleType]:
    """What is imported from below `sglang`."""
    utils = ModuleType("sglang.srt.utils")
    utils.MultiprocessingSerializer = SimpleNamespace(serialize=pickle.dumps)
    managers = ModuleType("sglang.srt.managers")
    managers.io_struct = Requests()
    return {"sglang.srt": ModuleType("sglang.srt"), "sglang.srt.managers": managers, "sglang.srt.utils": utils}
