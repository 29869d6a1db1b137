"""Build and fetch what the tests of a real mesh need, outside of any test's time: `python -m tests.mesh.prepare`."""

import sys

from tests.mesh.go_programs import STAMPS, GoBuildError, go_program
from tests.mesh.image import image_wheels
from tests.mesh.istio_envoys import ENVOYS, envoy_of


def main() -> None:
    """Print where each program is; end with a clear line where one cannot be had."""
    try:
        for name in STAMPS:
            print(go_program(name), flush=True)
    except GoBuildError as error:
        sys.exit(f"make test-mesh: {error}")
    for minor in ENVOYS:
        print(envoy_of(minor), flush=True)
    print(image_wheels(), flush=True)


if __name__ == "__main__":
    main()
