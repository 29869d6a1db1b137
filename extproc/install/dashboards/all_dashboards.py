"""All dashboards, in the order in which somebody looks at them."""

from extproc.install.dashboards.cache_and_index import CACHE_AND_INDEX
from extproc.install.dashboards.one_pod import ONE_POD
from extproc.install.dashboards.overview import OVERVIEW
from extproc.install.dashboards.panels import Dashboard
from extproc.install.dashboards.priorities import PRIORITIES

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, CACHE_AND_INDEX, PRIORITIES, ONE_POD)
