// How long tokens took in the last 15 minutes, by class and model, as this picker saw it, and by model, as the pods did.

import { timeline } from "./charts.js";
import { el, facts, keyed, table, text } from "./dom.js";
import { clock, count, exact, milliseconds, plural, share } from "./words.js";

const MEASURES = { ttft: "TTFT", "inter-token": "Inter-token time" };
const TARGETS = { ttft: "target_ttft_ms", "inter-token": "target_inter_token_ms" };
const LEAST_SLICES = 8; // that are drawn
export const PERCENTILES = ["p50", "p95", "p99"];

export function latencyView(root, app) {
  const summary = el("p", { class: "lead" });
  const parts = {
    answers: part("h-answers", "By class and model, as this picker saw it", [el("span", { class: "line-key slo", text: "SLO of the class" })]),
    pods: part("h-pods-latency", "By model, as the pods measured it", []),
  };
  root.append(el("header", { class: "view-head" }, el("h1", { id: "h-latency", tabindex: "-1", text: "Latency" }), summary), parts.answers.node, parts.pods.node);

  function update(state) {
    text(summary, lead(state));
    text(parts.answers.lead, answersLead(state));
    text(parts.pods.lead, "All requests on the pods, of all classes and all pickers, as the pods’ own histograms count them: from the request at the pod, without a queue or a prefill leg before it. Interpolated in the buckets of the histograms.");
    for (const [source, { rows, none }] of Object.entries(parts)) {
      const found = rowsOf(state, source);
      none.hidden = found.length > 0;
      text(none, nothing(state, source));
      drawRows(rows, found, state, app);
    }
  }
  return { update };
}

function part(id, words, more) {
  const made = { lead: el("p", { class: "muted" }), none: el("p", { class: "empty" }), rows: el("div", { class: "latency-rows" }) };
  const legend = el("p", { class: "legend" }, PERCENTILES.map((name) => el("span", { class: `line-key ${name}`, text: name })), more);
  return { ...made, node: el("section", { class: "panel latency", "aria-labelledby": id }, el("div", { class: "panel-head" }, el("h2", { id, text: words }), legend), made.lead, made.none, made.rows) };
}

function lead(state) {
  const past = state.past;
  if (!past) return "";
  const others = state.index?.replicas?.others ?? 0;
  const whose = others ? ` ${plural(others, "other picker")} ${others === 1 ? "keeps its" : "keep their"} own.` : "";
  const left = past.left_out ? ` ${plural(past.left_out, "series", "series")} with fewer requests not shown.` : "";
  return `The last 15 minutes in slices of ${past.slice_seconds} s, kept by picker ${past.picker || "?"} since ${clock(Math.max(past.since, past.first_at))}.${whose} With fewer than 100 in a slice, p99 is the slowest of them.${left}`;
}

function answersLead(state) {
  const past = state.past;
  if (!past) return "";
  const streams = past.latencies.filter((each) => each.source === "answers" && each.measure === "ttft").reduce((sum, each) => sum + each.whole.observed, 0);
  return `Streams whose body passes this picker: ${share(past.sample_share)} of all (sampleShare), and those of tenants with a token quota; ${exact(streams)} in 15 minutes. From the complete request at the picker to the token, so that its queue counts. Not in it: answers that are no streams, and clients that left before the first token.`;
}

function nothing(state, source) {
  if (source === "pods") return "No pod has reported a token in the last 15 minutes.";
  if (state.past?.sample_share === 0) return "No answer is read: observability.sampleShare is 0. What the pods measured is below.";
  return "No stream of the sample has ended in the last 15 minutes. What the pods measured is below.";
}

/** The series of one source as rows: {key, name, class, model, by: {ttft, inter-token}}. */
export function rowsOf(state, source, fits = () => true) {
  const rows = new Map();
  for (const each of state.past?.latencies ?? []) {
    if (each.source !== source || !fits(each)) continue;
    const key = `${each.class ?? ""} ${each.model} ${each.role ?? ""}`;
    const row = rows.get(key) ?? { key, class: each.class, model: each.model, role: each.role, by: {} };
    row.by[each.measure] = each;
    rows.set(key, row);
  }
  const rank = new Map((state.classes?.classes ?? []).map((each, i) => [each.class, i]));
  return [...rows.values()].sort((a, b) => (rank.get(a.class) ?? 99) - (rank.get(b.class) ?? 99));
}

export function drawRows(box, rows, state, app) {
  keyed(box, rows, (row) => row.key, (row) => makeRow(row, app), (node, row) => {
    for (const measure of Object.keys(MEASURES)) drawChart(node.charts[measure], row.by[measure], targetOf(state, row, measure), state);
  });
}

function targetOf(state, row, measure) {
  if (!row.class) return null;
  return (state.classes?.classes ?? []).find((each) => each.class === row.class)?.[TARGETS[measure]] ?? null;
}

function makeRow(row, app) {
  const model = row.model || "model not configured";
  const role = row.role && row.role !== "both" ? ` · role ${row.role}` : "";
  const name = row.class ? [el("button", { type: "button", class: "linkish", text: row.class, on: { click: () => app.openClass(row.class) } }), ` · ${model}`] : [`${model}${role}`];
  const charts = Object.fromEntries(Object.entries(MEASURES).map(([measure, words]) => [measure, makeChart(words)]));
  const node = el("section", { class: "latency-row" }, el("h3", {}, name), el("div", { class: "halves" }, Object.values(charts).map((each) => each.node)));
  return Object.assign(node, { charts });
}

function makeChart(words) {
  const said = el("p", { class: "spread" });
  const lines = timeline(PERCENTILES);
  const numbers = el("details", { class: "numbers" }, el("summary", { text: "Slice by slice" }), el("div"));
  const chart = { node: el("div", { class: "chart" }, el("h4", { text: words }), said, lines.node, numbers), said, lines, numbers, series: null };
  lines.onPoint = (i) => say(chart, i);
  numbers.addEventListener("toggle", () => fillNumbers(chart));
  return chart;
}

function drawChart(chart, series, target, state) {
  chart.series = series ?? null;
  chart.target = target;
  chart.past = state.past;
  chart.lines.node.hidden = chart.numbers.hidden = !series;
  const { first_at: first, slice_seconds: step, since } = state.past ?? {};
  if (series) {
    // a picker that was started lately has no older ones to show
    const count = series.slices.observed.length;
    chart.skipped = Math.max(0, Math.min(count - LEAST_SLICES, Math.floor((since - first) / step)));
    chart.lines.draw({ rows: PERCENTILES.map((name) => series.slices[`${name}_ms`].slice(chart.skipped)), target, first: first + chart.skipped * step, step, words: milliseconds });
  }
  say(chart, chart.lines.point);
  if (!chart.numbers.contains(document.activeElement)) fillNumbers(chart);
}

/** Says the percentiles of one slice, or those of all together. */
function say(chart, place) {
  const { series, target, past, said, skipped } = chart;
  const i = place === null ? null : place + skipped;
  if (!series) return text(said, "Nothing measured.");
  const slo = target ? ` SLO ${milliseconds(target)}.` : "";
  if (i === null) return text(said, `${words(series.whole)}; ${counted(series, series.whole.observed)} in 15 minutes.${slo}`);
  const at = clock(past.first_at + i * past.slice_seconds);
  const one = Object.fromEntries(PERCENTILES.map((name) => [`${name}_ms`, series.slices[`${name}_ms`][i]]));
  return text(said, series.slices.observed[i] ? `${at}: ${words(one)}; ${counted(series, series.slices.observed[i])}.${slo}` : `${at}: nothing measured.`);
}

const words = (spread) => PERCENTILES.map((name) => `${name} ${milliseconds(spread[`${name}_ms`])}`).join(", ");
const counted = (series, number) => plural(number, series.source === "answers" ? "stream" : series.measure === "ttft" ? "request" : "token");

function fillNumbers({ numbers, series, past }) {
  const box = numbers.lastChild;
  if (!numbers.open || !series) return box.replaceChildren();
  const shown = table("Slice by slice, the newest first", [{ label: "From" }, ...PERCENTILES.map((label) => ({ label, number: true })), { label: "Measured", number: true }]);
  const slices = series.slices.observed.map((observed, i) => [i, observed]).filter(([, observed]) => observed).reverse();
  shown.body.append(...slices.map(([i, observed]) => shown.row(clock(past.first_at + i * past.slice_seconds), ...PERCENTILES.map((name) => milliseconds(series.slices[`${name}_ms`][i])), count(observed))));
  return box.replaceChildren(shown.node);
}

/** One class in full, for the sheet: what it is promised, what came of it, how long its tokens took. */
export function classFacts(name, app) {
  return (state) => {
    const each = state.classes?.classes.find((one) => one.class === name);
    if (!each) return el("p", { text: "The policy has no such class now." });
    const rows = el("div", { class: "latency-rows" });
    const found = rowsOf(state, "answers", (series) => series.class === name);
    drawRows(rows, found, state, app);
    const lately = state.decisions.filter((one) => (one.request?.class ?? one.class) === name).slice(0, 8);
    return el(
      "div",
      {},
      facts([
        ["Priority", exact(each.priority).replace("-", "−")],
        ["TTFT SLO", each.target_ttft_ms ? milliseconds(each.target_ttft_ms) : "none"],
        ["Inter-token SLO", each.target_inter_token_ms ? milliseconds(each.target_inter_token_ms) : "none"],
        ["Share promised", each.objective ? share(each.objective) : "none"],
        ["SLO attainment, 5 minutes", each.attainment === null || each.attainment === undefined ? "nothing judged" : `${Number((each.attainment * 100).toFixed(1))} % of ${exact(each.judged)} judged`],
        ["Queued now", exact(each.waiting)],
        ["Routed, of the last decisions", exact(each.routed)],
        ["May be refused for load", each.sheddable ? "yes" : "no"],
        ["Degradation in force", (each.in_force ?? []).map((step) => step.step).join(", ") || "none"],
      ]),
      el("h3", { text: "How long its tokens took" }),
      found.length ? rows : el("p", { class: "muted", text: nothing(state, "answers") }),
      lately.length ? el("h3", { text: "Its last decisions" }) : null,
      lately.length ? el("ul", { class: "plain" }, lately.map((one) => el("li", {}, el("button", { type: "button", class: "linkish", on: { click: () => app.openDecision(one) } }, `${clock(one.at)}  ${one.endpoint ?? one.reason ?? "refused"}`)))) : null,
    );
  };
}
