"""The Lua scripts, loaded from the files beside this module. Used by the reader (snapshot only) and the writer."""

from importlib.resources import files

from kv_indexer.adapters.redis_link import Script


def _lua(name: str) -> str:
    """Return the text of one file."""
    return files("kv_indexer.adapters").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def _writing(name: str) -> Script:
    return Script(_lua("registry") + _lua(name))


APPLY = _writing("apply")
OPEN_STREAM = _writing("open_stream")
BEGIN_EPOCH = _writing("begin_epoch")
SET_STATE = _writing("set_state")
DROP_STREAM = _writing("drop_stream")
SWEEP = _writing("sweep")
HEARTBEAT = Script(_lua("heartbeat"))
SNAPSHOT = Script(_lua("snapshot"))
