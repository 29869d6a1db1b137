// The first view: how the pool is, what needs attention, and every pod at a glance.

import { bar, setBar, spark } from "./charts.js";
import { chip, el, keyed, roving, set, table, text } from "./dom.js";
import { fixOf } from "./findings.js";
import { decisionRow } from "./view_decisions.js";
import { troubleOf } from "./pod_trouble.js";
import { hashOf } from "./route.js";
import { hitRates, p95s, pastRates, podsTtft, rates, refusedLately } from "./store.js";
import { count, exact, isWell, milliseconds, plural, podState, roleOf, share, shortNames } from "./words.js";

const MANY = 24; // more pods are drawn smaller
const ORDERS = {
  address: ["By address", () => 0],
  busy: ["Busiest first", (a, b) => (b.running ?? 0) + 4 * (b.waiting ?? 0) - (a.running ?? 0) - 4 * (a.waiting ?? 0)],
  cache: ["Most cached first", (a, b) => b.cached_blocks - a.cached_blocks],
  trouble: ["Trouble first", (a, b) => isWell(a) - isWell(b) || (b.waiting ?? 0) - (a.waiting ?? 0)],
};

export function podsView(root, app) {
  const shown = { order: "address", as: "map" };
  let picks = new Map(); // of each pod, when it was drawn last
  const summary = el("p", { class: "lead" });
  const figures = el("dl", { class: "figures" });
  const attention = el("ul", { class: "attention plain" });
  const attentionPanel = el("section", { class: "panel needs", "aria-labelledby": "h-attention", hidden: true }, el("h2", { id: "h-attention", text: "Needs attention" }), attention);
  const tiles = el("ul", { class: "tiles plain", "aria-labelledby": "h-map" });
  const rows = table("Pods of this pool", [{ label: "Pod" }, { label: "State" }, { label: "Running", number: true }, { label: "Waiting", number: true }, { label: "KV use", number: true }, { label: "Hit rate", number: true }, { label: "Cached blocks", number: true }, { label: "Picked", number: true }]);
  const tableBox = el("div", { class: "table-box", hidden: true }, rows.node);
  const order = el("select", { id: "order", on: { change: (event) => change({ order: event.target.value }) } }, Object.entries(ORDERS).map(([key, [label]]) => el("option", { value: key, text: label })));
  const asMap = el("button", { type: "button", "aria-pressed": "true", text: "Map", on: { click: () => change({ as: "map" }) } });
  const asTable = el("button", { type: "button", "aria-pressed": "false", text: "Table", on: { click: () => change({ as: "table" }) } });
  const latest = el("ol", { class: "decisions short plain" });
  const none = el("p", { class: "empty", text: "No request has been decided yet." });
  const empty = el("p", { class: "empty", hidden: true, text: "This pool has no pods. They appear here as soon as they are discovered or named in --endpoints." });
  root.append(
    el("header", { class: "view-head" }, el("h1", { id: "h-pods", tabindex: "-1", text: "Pods" }), summary),
    figures,
    attentionPanel,
    el(
      "div",
      { class: "split" },
      el(
        "section",
        { class: "panel map", "aria-labelledby": "h-map" },
        el("div", { class: "panel-head" }, el("h2", { id: "h-map", text: "Load and cache" }), el("div", { class: "tools" }, el("label", { class: "unseen", for: "order", text: "Order" }), order, el("div", { class: "toggle", role: "group", "aria-label": "Show as" }, asMap, asTable))),
        empty,
        tiles,
        tableBox,
        el("p", { class: "legend" }, el("span", { class: "key load", text: "KV use" }), el("span", { class: "key cached", text: "blocks in the index, of the fullest pod’s" }), el("span", { class: "compact-only", text: "21 + 7: running + waiting" })),
      ),
      el("section", { class: "panel latest", "aria-labelledby": "h-latest" }, el("div", { class: "panel-head" }, el("h2", { id: "h-latest", text: "Latest decisions" }), el("a", { class: "more", href: "#/decisions", text: "All" })), none, latest),
    ),
  );
  const ready = roving(tiles, "button.pod");
  const parts = figureParts(figures);

  function change(wish) {
    Object.assign(shown, wish);
    set(asMap, { "aria-pressed": String(shown.as === "map") });
    set(asTable, { "aria-pressed": String(shown.as === "table") });
    tiles.hidden = shown.as !== "map";
    tableBox.hidden = shown.as !== "table";
    update(app.state);
  }

  function update(state) {
    const pods = state.pods?.pods ?? [];
    const names = shortNames(pods.map((pod) => pod.address));
    const sorted = [...pods].sort(ORDERS[shown.order][1]);
    const most = Math.max(1, ...pods.map((pod) => pod.cached_blocks ?? 0));
    // a glow where requests have just gone says something only where they do not go everywhere
    const few = pods.filter((pod) => pod.picks > (picks.get(pod.address) ?? pod.picks)).length <= Math.max(1, pods.length / 4);
    text(summary, lead(state, pods));
    parts.update(state);
    drawAttention(attentionPanel, attention, state, pods, names);
    empty.hidden = pods.length > 0 || state.pods === null;
    tiles.parentElement.classList.toggle("many", pods.length > MANY);
    if (shown.as === "map") keyed(tiles, sorted, (pod) => pod.address, (pod) => tile(pod, app), (node, pod) => drawTile(node, pod, { name: names.get(pod.address), most, glow: few }));
    else keyed(rows.body, sorted, (pod) => pod.address, () => rows.row("", "", "", "", "", "", "", ""), (node, pod) => drawRow(node, pod, app));
    picks = new Map(pods.map((pod) => [pod.address, pod.picks]));
    ready();
    none.hidden = state.decisions.length > 0;
    keyed(latest, state.decisions.slice(0, 9), (each) => each.id, (each) => decisionRow(each, app, { short: true }), (node) => node.update(state));
  }
  return { update };
}

function lead(state, pods) {
  const totals = state.pods?.totals;
  if (!totals) return "Waiting for the first word from the picker.";
  const well = pods.filter(isWell).length;
  const left = state.pods.left_out ? ` ${plural(state.pods.left_out, "pod")} more than fit on this page are left out.` : "";
  const all = well === pods.length ? (pods.length === 1 ? "One pod, and it is ready." : `${exact(pods.length)} pods, all ready.`) : `${exact(well)} of ${plural(pods.length, "pod")} ready.`;
  return `${pods.length ? all : "No pods."} ${state.policy.strategy ? `Strategy ${state.policy.strategy}.` : ""}${left}`;
}

function figureParts(figures) {
  const make = (label, kind, href = null) => {
    const value = el("span", { class: "value", text: "?" });
    const note = el("span", { class: "note" });
    const line = kind ? spark(kind) : null;
    figures.append(el("div", { class: "figure" }, el("dt", {}, href ? el("a", { href, text: label }) : label), el("dd", {}, value, note), line));
    return { value, note, line };
  };
  const hits = make("Hit rate", "cache");
  const rate = make("Requests a second", "load");
  const under = make("In flight");
  const ttft = make("TTFT, p95", "wait", "#/latency");
  const held = make("Cached blocks");
  const refused = make("Refused", "bad");
  function update(state) {
    const [found, each, totals, first] = [hitRates(state), rates(state), state.pods?.totals, podsTtft(state)];
    text(hits.value, found.whole === null ? "–" : share(found.whole));
    text(hits.note, found.whole !== null ? "expected, last 15 min" : "no prompts lately");
    hits.line.draw(found.each, { most: 1 });
    const lately = each.slice(-5);
    const mean = lately.reduce((sum, value) => sum + value, 0) / lately.length;
    text(rate.value, !lately.length ? "–" : mean < 100 ? mean.toFixed(1) : count(mean));
    text(rate.note, totals ? `${count(totals.picks)} routed in all` : "");
    rate.line.draw(pastRates(state));
    text(under.value, totals ? count(totals.running) : "–");
    // two pieces, neither of which is broken: between them is where a line may end
    if (!under.note.firstChild) under.note.append(el("span", { class: "piece" }), " ", el("span", { class: "piece" }));
    text(under.note.firstChild, totals ? `${count(totals.waiting)} waiting at pods,` : "");
    text(under.note.lastChild, totals ? `${count(state.classes?.waiting ?? 0)} queued` : "");
    text(ttft.value, first ? milliseconds(first.whole.p95_ms) : "–");
    text(ttft.note, first ? `p50 ${milliseconds(first.whole.p50_ms)}, at the pods` : "no tokens lately");
    ttft.line.draw(first ? p95s(state, first) : []);
    text(held.value, totals ? count(totals.cached_blocks) : "–");
    text(held.note, totals ? totals.cached_tokens ? `${count(totals.cached_tokens)} tokens` : "in the index" : "");
    const lost = refusedLately(state);
    text(refused.value, state.past ? count(lost.reduce((sum, one) => sum + one, 0)) : "–");
    text(refused.note, "last 15 min");
    refused.line.draw(lost);
  }
  return { update };
}

function drawAttention(panel, list, state, pods, names) {
  const items = [];
  const say = (key, kind, words, more, href) => items.push({ key, kind, words, more, href });
  const index = state.index;
  if (index?.problem) say("index", "error", `The prefix index is ${index.state}: ${index.problem}`, index.state === "unavailable" ? "Requests are balanced by load meanwhile, and by what was routed lately." : "What pods have cached or lost since is not known.", "#/index");
  else if (index && index.state !== "ok") say("index", "warning", `The prefix index is ${index.state}.`, "", "#/index");
  for (const each of index?.findings ?? []) if (each.severity === "error" || each.severity === "warning") say(`f ${each.check} ${each.subject} ${each.seen}`, each.severity, `${each.subject}: ${each.seen}`, fixOf(each), "#/index");
  const ill = pods.filter((pod) => !isWell(pod));
  if (ill.length === 1) {
    const trouble = troubleOf(ill[0], { now: Date.now() / 1000 + state.ahead, pool: state.pool });
    say("pods", "error", `${names.get(ill[0].address)} ${podState(ill[0])} ${trouble.since.replace(/ \(.*/, "")}`.trim(), `${trouble.why} ${trouble.next}`, hashOf("pods", ill[0].address));
  } else if (ill.length) say("pods", "error", ill.length > 4 ? `${exact(ill.length)} pods get no requests or report nothing.` : `${ill.map((pod) => `${names.get(pod.address)} ${podState(pod)}`).join(", ")}.`, "Each says since when, why, and what follows.", hashOf("pods", ill[0].address));
  for (const each of state.classes?.classes ?? []) for (const step of each.in_force ?? []) say(`s ${each.class} ${step.step} ${step.model_pool}`, "warning", `Class ${each.class} is under pressure: ${step.step}.`, "", hashOf("classes", each.class));
  const shown = items.sort((a, b) => (a.kind === "error" ? 0 : 1) - (b.kind === "error" ? 0 : 1)).slice(0, 4);
  if (items.length > shown.length) shown.push({ key: "more", kind: "more", words: `${exact(items.length - shown.length)} more`, href: "#/index" });
  panel.hidden = !items.length;
  keyed(list, shown, (item) => `${item.key} ${item.words}`, (item) =>
    el("li", { class: item.kind === "more" ? "more-line" : "" }, item.kind === "more" ? null : chip(item.kind, item.kind === "error" ? "bad" : "warn"), el("div", {}, item.href ? el("a", { href: item.href, text: item.words }) : el("span", { text: item.words }), item.more ? el("p", { class: "muted", text: item.more }) : null)),
  );
}

const unseen = (words) => el("span", { class: "unseen", text: words });

function tile(pod, app) {
  const part = {
    name: el("span", { class: "name" }),
    address: unseen(` ${pod.address}, `),
    role: el("span", { class: "role" }),
    state: el("span", { class: "state" }),
    load: bar(0, "load"),
    used: el("span"),
    cache: bar(0, "cache"),
    cached: el("span"),
    running: el("b"),
    waiting: el("b"),
    waits: el("span", { class: "waiting" }),
  };
  // its name for screen readers is what is written on it, with the words that eyes do not need
  const button = el(
    "button",
    { type: "button", class: "pod", tabindex: "-1", title: pod.address, on: { click: () => app.openPod(pod.address) } },
    el("span", { class: "tile-head" }, part.name, part.address, part.role, part.state),
    el("span", { class: "gauge-line" }, part.load, el("span", { class: "gauge-value" }, part.used, unseen(" KV use, "))),
    el("span", { class: "gauge-line" }, part.cache, el("span", { class: "gauge-value" }, part.cached, unseen(" blocks in the index, "))),
    el("span", { class: "tile-foot" }, el("span", {}, part.running, el("span", { class: "unit", text: " running" })), part.waits),
  );
  part.waits.append(el("span", { class: "plus", "aria-hidden": "true", text: "+ " }), part.waiting, el("span", { class: "unit", text: " waiting" }));
  const node = el("li", {}, button);
  Object.assign(node, { bits: part, button, picks: pod.picks });
  return node;
}

function drawTile(node, pod, { name, most, glow }) {
  const { bits: part, button } = node;
  const well = isWell(pod);
  text(part.name, name);
  text(part.role, well ? roleOf(pod) : "");
  text(part.state, well ? "" : podState(pod));
  setBar(part.load, pod.kv_usage);
  setBar(part.cache, (pod.cached_blocks ?? 0) / most);
  text(part.used, share(pod.kv_usage));
  text(part.cached, count(pod.cached_blocks));
  text(part.running, count(pod.running));
  text(part.waiting, count(pod.waiting));
  part.waits.classList.toggle("none", !pod.waiting);
  button.style.setProperty("--heat", `${Math.round((pod.kv_usage ?? 0) * 100)}%`);
  button.classList.toggle("ill", !well);
  if (glow && pod.picks > node.picks) {
    button.classList.remove("picked");
    requestAnimationFrame(() => button.classList.add("picked"));
  }
  node.picks = pod.picks;
}

function drawRow(node, pod, app) {
  const cells = [...node.children];
  if (!cells[0].querySelector("button")) cells[0].replaceChildren(el("button", { type: "button", class: "linkish mono", text: pod.address, on: { click: () => app.openPod(pod.address) } }));
  const state = podState(pod);
  const role = roleOf(pod);
  if (cells[1].textContent !== `${state}${role && ` ${role}`}`) cells[1].replaceChildren(chip(state, isWell(pod) ? "good" : "bad"), ...(role ? [" ", chip(role)] : []));
  [exact(pod.running), exact(pod.waiting), share(pod.kv_usage), share(pod.hit_rate), exact(pod.cached_blocks), `${exact(pod.picks)} (${share(pod.share)})`].forEach((words, i) => text(cells[i + 2], words));
}
