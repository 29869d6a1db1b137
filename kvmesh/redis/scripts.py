"""The Lua scripts, loaded from the files next to this module."""

from importlib.resources import files

from kvmesh.redis.link import Script


def _lua(name: str) -> str:
    return files("kvmesh.redis").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def _writing(name: str) -> Script:
    return Script(_lua("registry") + _lua(name))


APPLY = _writing("apply")
BEGIN_EPOCH = _writing("begin_epoch")
SET_STATE = _writing("set_state")
SET_STARTED_AT = _writing("set_started_at")
SET_NAMESPACE = _writing("set_namespace")
DROP_STREAM = _writing("drop_stream")
FIND_ELSEWHERE = _writing("find_elsewhere")
SWEEP = _writing("sweep")
BEAT = _writing("beat")
PULSE = _writing("pulse")
SURVEY = _writing("survey")
SETTLE = _writing("settle")
RELEASE = _writing("release")
ADMIN_CLEAR = _writing("admin_clear")
SNAPSHOT = Script(_lua("snapshot"))
