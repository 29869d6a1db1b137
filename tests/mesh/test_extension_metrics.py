"""The list of the inference extension's metrics against its own sources, of the release that istiod is built with."""

import json
import re
from pathlib import Path
from typing import Any

from tests.mesh.go_programs import module_folder
from tests.mesh.kube import MODULES

DATA = Path(__file__).parents[1] / "data" / "inference_extension_metrics.json"
PREFIXES = ("inference_pool", "inference_objective", "inference_extension")


def test_the_list_is_what_the_sources_declare() -> None:
    listed = json.loads(DATA.read_text(encoding="utf-8"))
    folder = Path(module_folder("istiod", MODULES["inference"]))
    assert listed["source"] == f"{MODULES['inference']}@{folder.name.partition('@')[2]}"
    metrics, collector = ((folder / name).read_text(encoding="utf-8") for name in listed["files"])
    found = {**dict(map(_named, declared(metrics))), **dict(map(_named, described(collector)))}
    assert found == dict(map(_named, listed["metrics"]))


def _named(metric: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return metric["name"], metric


def declared(source: str) -> list[dict[str, Any]]:
    """Return what is made by NewCounterVec and its like."""
    words = dict(re.findall(r'^\t(\w+)\s+= "([a-z_]+)"$', source, re.MULTILINE))
    buckets = {name: _numbers(text) for name, text in re.findall(r"(\w+Buckets) = \[\]float64\{([^}]*)\}", source)}
    labels = {name: _texts(text) for name, text in re.findall(r"(\w+[lL]abels)\s+= \[\]string\{([^}]*)\}", source)}
    vectors = r"prometheus\.New(\w+)Vec\(\n\t+prometheus\.\w+Opts\{(.*?)\n\t{1,2}\},\n\t+(.*?),\n\t?\)"
    metrics = []
    for kind, options, of in re.findall(vectors, source, re.DOTALL):
        subsystem = words[_one(r"Subsystem:\s*(\w+)", options)]
        if subsystem not in PREFIXES:
            continue
        first, last = re.match(r"append\((\w+)", of), re.search(r", (\w+)\.\.\.\)$", of)
        named = (
            labels[of]
            if of in labels
            else [
                *(labels.get(first[1], ()) if first else ()),
                *_texts(of),
                *(labels[last[1]] if last else ()),
            ]
        )
        name = _one(r'Name:\s*"(\w+)"', options)
        metric = {"name": f"{subsystem}_{name}", "type": kind.lower(), "labels": named}
        if bounds := re.search(r"Buckets:\s*(?:\[\]float64\{(.*?)\}|(\w+))", options, re.DOTALL):
            metric["buckets"] = buckets[bounds[2]] if bounds[2] else _numbers(bounds[1])
        metrics.append(metric)
    return metrics


def described(source: str) -> list[dict[str, Any]]:
    """Return what is made by NewDesc, which are gauges there."""
    found = re.findall(r'NewDesc\(\n\t\t"(\w+)",.*?\[\]string\{(.*?)\}', source, re.DOTALL)
    return [{"name": name, "type": "gauge", "labels": _texts(text)} for name, text in found]


def _one(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1]


def _texts(text: str) -> list[str]:
    return re.findall(r'"(\w+)"', text)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", re.sub(r"//[^\n]*", "", text))]
