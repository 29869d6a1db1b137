"""Documents of pools that cannot be right: two pools that take the same pod, and one whose port is none."""

import yaml

from tests.integration.kube_documents import pod, pool

_NOBODY = "127.0.0.9"  # an address where nothing listens
WRONG_POOLS = {
    "twice.yaml": yaml.safe_dump_all([pool("one"), pool("two"), pod("nobody", _NOBODY)]),
    "broken.yaml": yaml.safe_dump(pool("broken") | {"spec": {"selector": {}, "targetPorts": 7}}),
}
