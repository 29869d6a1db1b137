"""`python -m operate` is the command `kvmesh`: how the supervisor starts roles without relying on PATH."""

from operate.cli import main

if __name__ == "__main__":
    main()
