// What was decided, as it happens; each opens into its whole explanation.

import { bar } from "./charts.js";
import { chip, el, keyed, roving, set, text } from "./dom.js";
import { tokensOf } from "./explanation.js";
import { endOf } from "./store.js";
import { clock, exact, milliseconds, plural } from "./words.js";

const SHOWN = 100;

export function decisionsView(root, app) {
  const held = { paused: false, items: null };
  const summary = el("p", { class: "lead" });
  const list = el("ol", { class: "decisions plain", "aria-labelledby": "h-decisions" });
  const search = el("input", { id: "search", type: "search", placeholder: "Request or decision id, model, pod or class", on: { input: () => refresh() } });
  const kind = el("select", { id: "kind", on: { change: () => refresh() } }, [["", "All"], ["refused", "Refused"], ["cold", "Cold"], ["lost", "Better cache elsewhere"], ["degraded", "Input missing"], ["queued", "Queued"], ["split", "Prefilled elsewhere"], ["failed", "Failed"]].map(([value, label]) => el("option", { value, text: label })));
  const pause = el("button", { type: "button", "aria-pressed": "false", text: "Pause", on: { click: () => hold(!held.paused) } });
  const news = el("button", { type: "button", class: "news", hidden: true, on: { click: () => hold(false) } });
  const none = el("p", { class: "empty" });
  root.append(
    el("header", { class: "view-head" }, el("h1", { id: "h-decisions", tabindex: "-1", text: "Decisions" }), summary),
    el("section", { class: "panel" }, el("div", { class: "panel-head" }, el("div", { class: "tools wide" }, el("label", { class: "unseen", for: "search", text: "Search" }), search, el("label", { class: "unseen", for: "kind", text: "Which" }), kind, pause)), news, el("div", { class: "decision-heads", "aria-hidden": "true" }, ["At", "Model and class", "Pod", "Cached tokens", "Outcome"].map((words) => el("span", { text: words }))), none, list),
  );
  const ready = roving(list, "button.decision");

  function hold(paused) {
    held.paused = paused;
    held.items = paused ? [...app.state.decisions] : null;
    set(pause, { "aria-pressed": String(paused), text: paused ? "Go on" : "Pause" });
    refresh();
  }

  const refresh = () => update(app.state);

  // what somebody is about to open must not move away under the pointer or the focus
  const busy = () => list.matches(":hover") || list.contains(document.activeElement);

  function update(state) {
    if (!held.paused && busy()) held.items ??= [...state.decisions];
    else if (!held.paused) held.items = null;
    const all = held.items ?? state.decisions;
    const newer = held.items ? state.decisions.findIndex((each) => each.id === held.items[0]?.id) : 0;
    const waiting = newer < 0 ? state.decisions.length : newer;
    news.hidden = !(held.paused && waiting > 0);
    text(news, `${plural(waiting, "newer decision")}: show`);
    const words = search.value.trim().toLowerCase();
    const found = all.filter((each) => fits(each, words, kind.value, state)).slice(0, SHOWN);
    text(summary, lead(state));
    none.hidden = found.length > 0;
    text(none, state.decisions.length ? "None of the last decisions fits." : "No request has been decided yet. Send one through the gateway, and it appears here with its reasons.");
    keyed(list, found, (each) => each.id, (each) => decisionRow(each, app), (node) => node.update(state));
    ready();
  }
  return { update };
}

function lead(state) {
  const missed = state.missed ? ` ${exact(state.missed)} more came faster than they can be shown.` : "";
  return `The last ${exact(Math.min(state.decisions.length, SHOWN))}, newest first, each with its reasons. Prompts are not kept with them.${missed}`;
}

function fits(each, words, kind, state) {
  const outcome = endOf(state, each);
  const is = {
    refused: () => each.endpoint === null,
    cold: () => each.prompt_tokens > 0 && !each.matched_tokens,
    lost: () => (each.best_matched_tokens ?? 0) > (each.matched_tokens ?? 0),
    degraded: () => each.degraded?.length > 0,
    queued: () => each.queued_ms > 0,
    split: () => each.prefill?.where === "remote",
    failed: () => outcome !== null && !(outcome.status >= 200 && outcome.status < 400),
  };
  if (kind && !is[kind]()) return false;
  return !words || [each.id, each.request_id, each.endpoint, each.class, each.request?.model, each.request?.class, each.reason].some((value) => value?.toLowerCase().includes(words));
}

const unseen = (words) => el("span", { class: "unseen", text: words });

/** One decision as a line that opens its explanation. */
export function decisionRow(decision, app, { short = false } = {}) {
  const refused = decision.endpoint === null;
  const outcome = el("span", { class: "outcome" });
  const pod = el("span", { class: "pod-short mono" });
  const tokens = tokensOf(decision);
  const found = el("span", { class: "found" }, el("span", { class: "tokens" }, tokens, tokens ? unseen(" tokens cached, ") : null), tokens ? bar(decision.matched_tokens / decision.prompt_tokens, "cache") : null);
  const model = decision.request?.model ?? decision.model ?? "–";
  const prefiller = decision.prefill?.where === "remote" ? decision.prefill.endpoint : null;
  const kind = decision.request?.class ?? decision.class ?? "";
  const button = el("button", { type: "button", class: `decision${refused ? " refused" : ""}`, on: { click: () => app.openDecision(decision) } }, el("span", { class: "at" }, clock(decision.at), unseen(", ")), el("span", { class: "what" }, el("span", { class: "model", text: model }), el("span", { class: "class" }, unseen(" class "), kind)), el("span", { class: "pod-cell" }, unseen(refused ? " refused: " : " to "), pod, unseen(prefiller ? ", which gets the cache of the first one, " : ", ")), found, outcome);
  const node = el("li", {}, button);
  node.update = (state) => {
    const names = app.names(state);
    const named = (endpoint) => names.get(endpoint) || endpoint;
    const via = prefiller ? `${named(prefiller)} → ` : "";
    text(pod, refused ? (decision.reason ?? "refused") : `${via}${short || prefiller ? named(decision.endpoint) : decision.endpoint}`);
    const ended = endOf(state, decision);
    const words = said(decision, ended);
    if (outcome.textContent !== words.text) outcome.replaceChildren(words.kind ? chip(words.text, words.kind) : words.text);
  };
  return node;
}

function said(decision, ended) {
  if (decision.endpoint === null) return { text: String(decision.status), kind: "bad" };
  if (!ended) return decision.queued_ms ? { text: `queued ${milliseconds(decision.queued_ms)}`, kind: "warn" } : { text: "routed", kind: "" };
  if (!ended.status) return { text: "no answer", kind: "bad" };
  const words = `${ended.status} · ${milliseconds(ended.seconds * 1000)}`;
  return ended.status >= 200 && ended.status < 400 ? { text: words, kind: "" } : { text: words, kind: "bad" };
}

