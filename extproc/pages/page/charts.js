// Small drawings: bars, lines, strips of pods. What they show is also said in words beside them.

import { el } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const percent = (part) => `${Math.round(Math.min(1, Math.max(0, part || 0)) * 1000) / 10}%`;

/** A bar from 0 to 1. */
export function bar(part, kind = "cache") {
  const node = el("span", { class: `bar ${kind}`, "aria-hidden": "true" }, el("i"));
  setBar(node, part);
  return node;
}

export function setBar(node, part) {
  const wide = percent(part);
  if (node.style.getPropertyValue("--part") !== wide) node.style.setProperty("--part", wide);
}

/** A line through the values, the last at the right; empty where there are less than two. */
export function spark(kind) {
  const node = svg("svg", { class: `spark ${kind}`, viewBox: "0 0 120 28", preserveAspectRatio: "none", "aria-hidden": "true" });
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  node.append(area, line);
  node.draw = (values, { most = null } = {}) => {
    const shown = values.slice(-60);
    const top = most ?? Math.max(...shown, 1e-9);
    const points = shown.map((value, i) => `${((120 * (60 - shown.length + i)) / 59).toFixed(1)} ${(26 - (24 * Math.min(value, top)) / top).toFixed(1)}`);
    const path = points.length > 1 ? `M${points.join("L")}` : "";
    line.setAttribute("d", path);
    area.setAttribute("d", path && `${path}L120 28L${points[0].split(" ")[0]} 28Z`);
  };
  return node;
}

/** One small cell for each pod, filled where `held` has it: who holds a prefix, at a glance. */
export function strip(addresses, held) {
  const node = el("span", { class: "strip", "aria-hidden": "true" });
  drawStrip(node, addresses, held);
  return node;
}

export function drawStrip(node, addresses, held) {
  const drawn = `${addresses.length}|${[...held].join(" ")}`;
  if (node.drawn === drawn) return;
  node.drawn = drawn;
  node.style.setProperty("--columns", String(Math.min(32, Math.max(1, addresses.length))));
  node.replaceChildren(
    ...addresses.map((address) => {
      const part = held.get(address);
      return el("i", part === undefined ? {} : { class: "held", vars: { "--part": String(0.45 + 0.55 * Math.min(1, part)) } });
    }),
  );
}

/** Segments side by side, each with its share of the whole width. `segments`: [{part, kind}]. */
export function stack(segments) {
  return el("span", { class: "stack", "aria-hidden": "true" }, segments.filter(({ part }) => part > 0).map(({ part, kind }) => el("i", { class: kind, vars: { "--part": percent(part) } })));
}
