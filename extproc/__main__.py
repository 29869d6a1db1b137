"""`python -m extproc` is the command `kvmesh`: how the supervisor starts roles without relying on PATH."""

from extproc.cli import main

if __name__ == "__main__":
    main()
