"""`python -m podsim`: the command `sim` without the rest of kvmesh."""

import logging

from podsim.cli import app

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    app(prog_name="podsim")
