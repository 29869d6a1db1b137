"""What `kvmesh up` prints where nobody reads it any more, and what it leaves for others where it cannot write."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmesh.output.standard_output import ending
from operate.local.errors import UpError
from operate.local.mesh_view import MeshView
from operate.local.stack_settings import StackSettings


@contextmanager
def read_by() -> Iterator[int]:
    """Standard output is a pipe that ends the command, as in `kvmesh`; the end to read from."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", ending(stream, tell=pytest.fail))
        yield reading


def view(folder: Path) -> MeshView:
    return MeshView(
        StackSettings(model="tiny"), folder=folder, redis="127.0.0.1:1", notes=(), pids=lambda: {"extproc": os.getpid()}
    )


def test_a_mesh_that_is_up_outlives_the_reader_of_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with read_by() as reader:
        mesh = view(tmp_path)
        mesh.greet()
        mesh.tell("pod-0", "was killed")
        assert b"pod-0 (127.0.0.1:8101) was killed" in os.read(reader, 100_000)

        os.close(reader)
        mesh.tell("pod-0", "is ready again")
        mesh.tell("pod-0", "was killed")

    said = capfd.readouterr().err
    assert said == "kvmesh up: standard output cannot be written, and is lost: Broken pipe\n"


def test_before_it_is_up_a_reader_that_leaves_ends_it(tmp_path: Path) -> None:
    with read_by() as reader:
        os.close(reader)
        with pytest.raises(SystemExit):
            view(tmp_path).greet()


def test_files_that_cannot_be_written_are_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UpError, match=r"gone.* cannot be written: No such file"):
        view(tmp_path / "gone").greet()
