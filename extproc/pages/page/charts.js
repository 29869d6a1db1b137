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
    const top = most ?? Math.max(...values.filter((value) => value !== null), 1e-9);
    node.classList.toggle("flat", top <= 1e-9); // nothing to see
    const x = (i) => ((120 * i) / Math.max(1, values.length - 1)).toFixed(1);
    const runs = runsOf(values).filter((run) => run.length > 1);
    const paths = runs.map((run) => `M${run.map(([i, value]) => `${x(i)} ${(26 - (24 * Math.min(value, top)) / top).toFixed(1)}`).join("L")}`);
    line.setAttribute("d", paths.join(""));
    area.setAttribute("d", paths.map((path, n) => `${path}L${x(runs[n].at(-1)[0])} 28L${x(runs[n][0][0])} 28Z`).join(""));
  };
  return node;
}

/** The values without their gaps: runs of [place, value]. */
function runsOf(values) {
  const runs = [];
  let run = null;
  values.forEach((value, i) => {
    if (value === null || value === undefined) run = null;
    else if (run) run.push([i, value]);
    else runs.push((run = [[i, value]]));
  });
  return runs;
}

const WIDE = 600; // units of a drawing over time
const HIGH = 120;
const SHORT_SECONDS = 600; // a time axis with seconds
const TICKS = 3; // parts of the time's axis

/** The least of 1, 2, 2.5, 5 times a power of ten that is not below. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return power * [1, 2, 2.5, 5, 10].find((each) => each * power >= value * 0.999);
}

/**
 * Lines over time, the last value at the right; what was not measured is a gap. `draw({rows, target, first, step, words})`:
 * a row for each of `names`, the unix seconds of the first value, seconds from one to the next, a value in words.
 * `onPoint(i)` is called with the place that is pointed at, null where none is.
 */
export function timeline(names) {
  const drawing = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const band = svg("path", { class: "band" });
  const lines = names.map((name) => svg("path", { class: name }));
  const slo = svg("path", { class: "slo" });
  const cursor = svg("path", { class: "cursor" });
  drawing.append(band, slo, ...lines, cursor);
  const top = el("span", { class: "top-value" });
  const times = el("span", { class: "times" }, Array.from({ length: TICKS + 1 }, () => el("span")));
  const made = { node: el("div", { class: "timeline", "aria-hidden": "true" }, drawing, top, times), point: null, onPoint: () => {} };
  let count = 1;
  made.draw = ({ rows, target, first, step, words }) => {
    count = rows[0].length;
    const most = Math.max(...rows.flat().filter((value) => value !== null), 1e-9);
    const high = niceTop(target && target < 3 * most ? Math.max(most, 1.1 * target) : most);
    const x = (i) => ((WIDE * (i + 0.5)) / count).toFixed(1);
    const y = (value) => (HIGH * (1 - value / high)).toFixed(1);
    const half = WIDE / count / 2;
    lines.forEach((line, n) => line.setAttribute("d", runsOf(rows[n]).map((run) => (run.length > 1 ? `M${run.map(([i, value]) => `${x(i)} ${y(value)}`).join("L")}` : `M${x(run[0][0] - 0.4)} ${y(run[0][1])}h${(half * 1.6).toFixed(1)}`)).join("")));
    band.setAttribute("d", runsOf(rows.at(-1)).filter((run) => run.length > 1).map((run) => `M${run.map(([i, value]) => `${x(i)} ${y(value)}`).join("L")}L${run.toReversed().map(([i]) => `${x(i)} ${y(rows[0][i])}`).join("L")}Z`).join(""));
    slo.setAttribute("d", target && target <= high ? `M0 ${y(target)}H${WIDE}` : "");
    top.textContent = words(high);
    [...times.children].forEach((node, n) => (node.textContent = new Date(1000 * (first + (step * count * n) / TICKS)).toLocaleTimeString("en-GB", step * count < SHORT_SECONDS ? {} : { hour: "2-digit", minute: "2-digit" })));
    cursor.setAttribute("d", made.point === null ? "" : `M${x(made.point)} 0V${HIGH}`);
  };
  const point = (i) => {
    made.point = i;
    cursor.setAttribute("d", i === null ? "" : `M${((WIDE * (i + 0.5)) / count).toFixed(1)} 0V${HIGH}`);
    made.onPoint(i);
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    point(Math.max(0, Math.min(count - 1, Math.floor((count * (event.clientX - box.left)) / box.width))));
  });
  drawing.addEventListener("pointerleave", () => point(null));
  return made;
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
