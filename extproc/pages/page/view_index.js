// Whether the index tells the truth: findings and what to do about them, the pods' event streams, what decisions lacked.

import { fixOf, meaningOf } from "./findings.js";
import { chip, el, facts, keyed, set, table, text } from "./dom.js";
import { age, clock, count, exact, plural } from "./words.js";

const SEVERITIES = { error: "bad", warning: "warn", unchecked: "", ok: "good" };
const RANK = Object.keys(SEVERITIES);
const FEW = 16; // event streams that are listed without being asked for
const STATES = { live: "good", replaying: "warn", degraded: "warn", unconfirmed: "warn", lost: "bad" };

export function indexView(root, app) {
  const summary = el("p", { class: "lead" });
  const findings = el("ul", { class: "findings plain" });
  const well = el("details", {}, el("summary"), el("ul", { class: "plain fine" }));
  const noFindings = el("p", { class: "empty" });
  const degraded = table("Inputs that decisions had to do without", [{ label: "Missing" }, { label: "What that means" }, { label: "Decisions", number: true }, { label: "Last", number: true }]);
  const noDegraded = el("p", { class: "empty", text: "Every decision had all it needed." });
  const sources = table("Event streams of the pods", [{ label: "Pod" }, { label: "Stream" }, { label: "State" }, { label: "Blocks", number: true }, { label: "Events", number: true }, { label: "Last event", number: true }, { label: "Followed by" }]);
  const noSources = el("p", { class: "empty", text: "The index knows no event stream. Is an indexer running, and do the pods publish KV events?" });
  const left = el("p", { class: "muted" });
  let everything = false;
  const states = el("p", { class: "chips states" });
  const more = el("button", { type: "button", "aria-expanded": "false", on: { click: () => ((everything = !everything), update(app.state)) } });
  const unreadable = el("div");
  const replicas = el("div");
  root.append(
    el("header", { class: "view-head" }, el("h1", { id: "h-index", tabindex: "-1", text: "Index" }), summary),
    el("section", { class: "panel", "aria-labelledby": "h-findings" }, el("h2", { id: "h-findings", text: "Findings" }), noFindings, findings, well),
    el("div", { class: "halves" }, el("section", { class: "panel", "aria-labelledby": "h-missing" }, el("h2", { id: "h-missing", text: "Decided without" }), noDegraded, degraded.node), el("section", { class: "panel", "aria-labelledby": "h-replicas" }, el("h2", { id: "h-replicas", text: "Other pickers" }), replicas)),
    el("section", { class: "panel", "aria-labelledby": "h-sources" }, el("h2", { id: "h-sources", text: "Event streams" }), states, noSources, unreadable, sources.node, left, more),
  );

  function update(state) {
    const data = state.index;
    const now = Date.now() / 1000 + state.ahead;
    text(summary, lead(data));
    drawFindings(data, { findings, well, noFindings });
    const missing = data?.degraded ?? [];
    noDegraded.hidden = missing.length > 0;
    degraded.node.hidden = missing.length === 0;
    keyed(degraded.body, missing, (each) => each.reason, (each) => degraded.row(each.reason, each.words, "", ""), (row, each) => {
      text(row.children[1], each.words);
      text(row.children[2], exact(each.count));
      text(row.children[3], `${age(now - each.last_at)} ago`);
    });
    const streams = [...(data?.sources ?? [])].sort((a, b) => (a.state === "live") - (b.state === "live"));
    noSources.hidden = streams.length > 0 || !data;
    drawStates(states, streams);
    // many streams that are well say no more than their number
    const listed = everything || streams.length <= FEW ? streams : streams.filter((each) => each.state !== "live").slice(0, FEW);
    more.hidden = streams.length <= FEW;
    set(more, { "aria-expanded": String(everything), text: everything ? "Show fewer" : `Show all ${exact(streams.length)}` });
    sources.node.hidden = listed.length === 0;
    keyed(sources.body, listed, (each) => `${each.endpoint} ${each.dp_rank} ${each.tier}`, (each) => sources.row(each.endpoint, "", "", "", "", "", ""), (row, each) => drawSource(row, each, now));
    text(left, data?.left_out ? `${plural(data.left_out, "stream")} more than fit on this page.` : "");
    drawLines(unreadable, data?.unreadable ?? []);
    drawReplicas(replicas, data?.replicas);
  }
  return { update, app };
}

function lead(data) {
  if (!data) return "";
  if (data.state === "unavailable") return `The index cannot be read${data.problem ? `: ${data.problem}` : ""}. Requests are balanced by load, and by what was routed lately.`;
  const live = (data.sources ?? []).filter((each) => each.state === "live").length;
  const follow = `${exact(live)} of ${plural(data.sources_count ?? data.sources?.length ?? 0, "event stream")} live`;
  if (data.state === "stale" || !data.indexer_alive) return `No indexer keeps the index true${data.problem ? `: ${data.problem}` : ""}. ${follow}.`;
  return `The index is kept up to date: ${follow}.${data.problem ? ` ${data.problem}` : ""}`;
}

/** The number of findings that need somebody, for the navigation. */
export const troubles = (state) => (state.index?.findings ?? []).filter((each) => each.severity === "error" || each.severity === "warning").length + (state.index && state.index.state !== "ok" ? 1 : 0);

function drawFindings(data, { findings, well, noFindings }) {
  const all = [...(data?.findings ?? [])].sort((a, b) => RANK.indexOf(a.severity) - RANK.indexOf(b.severity));
  const shown = all.filter((each) => each.severity !== "ok");
  const fine = all.filter((each) => each.severity === "ok");
  const key = (each) => `${each.check} ${each.severity} ${each.subject} ${each.seen}`;
  keyed(findings, shown, key, (each) =>
    el("li", {}, el("p", { class: "chips" }, chip(each.severity, SEVERITIES[each.severity] ?? ""), el("code", { text: each.check }), el("b", { class: "mono", text: each.subject }), each.since ? el("span", { class: "muted", text: `since ${clock(each.since)}` }) : null), el("p", { text: each.seen }), meaningOf(each) ? el("p", { class: "muted", text: meaningOf(each) }) : null, fixOf(each) ? el("p", { class: "fix" }, el("span", { class: "arrow", "aria-hidden": "true", text: "→" }), el("span", { class: "unseen", text: "What to do: " }), fixOf(each)) : null),
  );
  well.hidden = fine.length === 0;
  text(well.firstChild, `${plural(fine.length, "check")} fine`);
  keyed(well.lastChild, fine, key, (each) => el("li", {}, el("code", { text: each.check }), ` ${each.seen}`));
  noFindings.hidden = shown.length > 0;
  text(noFindings, !data || data.findings_state === "not-yet" ? "The checks at start-up have not been made yet: they begin ten seconds after the picker." : "Nothing is wrong that the checks would find. kvmesh doctor looks deeper.");
}

function drawStates(box, streams) {
  const counts = new Map();
  for (const each of streams) counts.set(each.state, (counts.get(each.state) ?? 0) + 1);
  keyed(box, [...counts], ([state]) => state, ([state]) => chip("", STATES[state] ?? "warn"), (node, [state, number]) => text(node, `${exact(number)} ${state}`));
}

function drawSource(row, each, now) {
  const cells = row.children;
  text(cells[1], `rank ${each.dp_rank}, ${each.tier ?? "tier unknown"}`);
  const words = each.reason ? `${each.state}: ${each.reason}` : each.state;
  if (cells[2].textContent !== words) cells[2].replaceChildren(chip(words, STATES[each.state] ?? "warn"));
  text(cells[3], exact(each.cached_blocks));
  text(cells[4], count(each.events));
  text(cells[5], each.last_batch_at ? `${age(now - each.last_batch_at)} ago` : "never");
  text(cells[6], each.owner || "nobody");
}

function drawLines(box, lines) {
  keyed(box, lines, (line) => line, (line) => el("p", { class: "problem" }, chip("unreadable", "bad"), ` ${line}`));
}

function drawReplicas(box, replicas) {
  const words = JSON.stringify(replicas ?? null);
  if (box.words === words) return;
  box.words = words;
  if (!replicas) return void box.replaceChildren(el("p", { class: "empty", text: "This picker shares no load with others." }));
  const booked = Object.values(replicas.others_bookings ?? {}).reduce((sum, value) => sum + (typeof value === "number" ? value : 0), 0);
  box.replaceChildren(
    replicas.problem ? el("p", { class: "problem" }, chip("error", "bad"), ` ${replicas.problem}`) : "",
    facts([["This picker", replicas.replica], ["Others heard of", exact(replicas.others)], ["Their requests in flight", exact(booked)]]),
  );
}

