"""A defect is told by where it happened, never by words that a client may have sent."""

import asyncio
import gc
import json
import logging
import subprocess
import sys

import pytest

from extproc.errors import KvmeshError
from kvmesh.logs import LogFormat, LogLevel, _JsonFormatter, _TextFormatter, plain_traceback

SECRET = "zebra7f3a"


def a_defect(prompt: str) -> None:
    try:
        dict[str, int]()[prompt]
    except KeyError as error:
        raise ValueError(f"no number: {prompt}") from error


def caught(prompt: str = SECRET) -> Exception:
    with pytest.raises(ValueError, match="no number") as raised:
        a_defect(prompt)
    return raised.value


def test_where_it_happened_is_told_and_what_it_says_is_not() -> None:
    said = plain_traceback(caught())
    assert "KeyError: (its message is left out" in said
    assert "ValueError: (its message is left out" in said
    assert said.index("KeyError:") < said.index("which led to:") < said.index("ValueError:")
    assert "in a_defect" in said
    assert SECRET not in said


def test_our_own_words_and_the_systems_are_told() -> None:
    assert plain_traceback(KvmeshError("say --yes")).endswith("extproc.errors.KvmeshError: say --yes")
    assert plain_traceback(ConnectionRefusedError(111, "Connection refused")).endswith("refused")


def test_groups_and_long_chains_are_told_within_bounds() -> None:
    group = ExceptionGroup("two have failed", [caught(), KvmeshError("ours")])
    said = plain_traceback(group)
    assert "ExceptionGroup: two have failed (2 sub-exceptions)" in said
    assert "  extproc.errors.KvmeshError: ours" in said
    assert SECRET not in said
    chain: Exception = ValueError(SECRET)
    for _ in range(100):
        chain, chain.__cause__ = ValueError(SECRET), chain
    assert len(plain_traceback(chain)) < 5000


@pytest.mark.parametrize("form", list(LogFormat))
def test_log_lines_of_both_forms_hold_it_so(form: LogFormat) -> None:
    error = caught()
    record = logging.makeLogRecord(
        {"name": "kvmesh", "levelname": LogLevel.ERROR, "msg": "failed", "exc_info": (type(error), error, None)}
    )
    line = (_JsonFormatter() if form is LogFormat.JSON else _TextFormatter()).format(record)
    assert "in a_defect" in (json.loads(line)["exception"] if form is LogFormat.JSON else line)
    assert SECRET not in line


FORMS = pytest.mark.parametrize("form", list(LogFormat))


def formatted(form: LogFormat, record: logging.LogRecord) -> str:
    return (_JsonFormatter() if form is LogFormat.JSON else _TextFormatter()).format(record)


@FORMS
def test_asyncio_tells_where_a_task_or_callback_failed_and_not_what_it_held(
    form: LogFormat, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(asyncio.to_thread(a_defect, SECRET))
        await asyncio.wait([task])
        del task
        gc.collect()  # nobody has asked it: that is told when it is forgotten
        loop.call_soon(a_defect, SECRET)
        await asyncio.sleep(0)

    asyncio.run(fail())
    records = [record for record in caplog.records if record.name == "asyncio"]
    assert any(SECRET in record.getMessage() for record in records), "nothing was there to be left out"
    said = "\n".join(formatted(form, record) for record in records)
    assert "Task exception was never retrieved" in said
    assert "Exception in callback a_defect" in said
    assert said.count("in a_defect") >= 2
    assert SECRET not in said


@FORMS
def test_what_comes_from_outside_never_looks_like_another_line(form: LogFormat) -> None:
    words = "a\n12:00:00.000 error   kvmesh: forged\x1b[2J\x9b\u2028"
    record = logging.makeLogRecord({"name": "kvmesh", "levelname": "INFO", "msg": words, "model": words})
    line = formatted(form, record)
    assert len(line.split("\n")) == 1
    assert "\x1b" not in line
    assert line.count("forged") == 2


@FORMS
def test_bytes_that_are_no_text_cost_no_log_line(form: LogFormat) -> None:
    record = logging.makeLogRecord({"name": "kvmesh", "levelname": "INFO", "msg": "a pick", "request_id": "\udcff1"})
    assert "a pick" in formatted(form, record)


@pytest.mark.parametrize("where", ["raise ValueError(SECRET)", "THREAD"])
def test_a_crash_of_a_process_or_thread_is_told_by_where_it_happened(where: str) -> None:
    crash = "import threading; t = threading.Thread(target=int, args=(SECRET,)); t.start(); t.join()"
    program = f"""
from kvmesh.logs import tell_crashes_so
tell_crashes_so()
SECRET = "{SECRET}"
{crash if where == "THREAD" else where}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "ValueError: (its message is left out" in ended.stderr
    assert SECRET not in ended.stderr + ended.stdout
