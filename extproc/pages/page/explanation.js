// A decision in full: where it went, why, what every scorer said of every pod, and who was left out.

import { stack } from "./charts.js";
import { chip, el, facts, table } from "./dom.js";
import { SCORERS, clock, count, exact, milliseconds, plural, share } from "./words.js";

const HUES = 8; // classes hue-0 … hue-7 of the style sheet
const TELLING = 0.005; // points: less is no reason
// the index was not read: docs/explanation/picking.md
const UNREAD = new Set(["prefix-index-unavailable", "prefix-index-timeout"]);
const isUnread = (decision) => !decision.best_matched_tokens && (decision.degraded ?? []).some((word) => UNREAD.has(word));

export const tokensOf = (decision) => {
  if (!decision.prompt_tokens) return "";
  return `${count(decision.matched_tokens)} of ${count(decision.prompt_tokens)}`;
};

/**
 * Returns the explanation. `names` shortens addresses; `ended` is what became of it; `all` fetches all candidates;
 * `asked` is the class that a rehearsed request asked for.
 */
export function explanation(decision, { names = (address) => address, ended = null, all = null, rehearsed = false, asked = "" } = {}) {
  const routed = decision.endpoint !== null && decision.endpoint !== undefined;
  return el(
    "div",
    { class: "explanation" },
    verdict(decision, { names, ended, routed, rehearsed }),
    el("ul", { class: "why" }, [...sentences(decision, names), ...unheard(decision, asked)].map((words) => el("li", { text: words }))),
    decision.prompt_tokens && routed && !isUnread(decision) ? prompt(decision) : null,
    decision.candidates?.length ? candidates(decision, names, all) : null,
    decision.rejected?.length ? leftOut(decision, names) : null,
    missing(decision),
    requestFacts(decision),
  );
}

function verdict(decision, { names, ended, routed, rehearsed }) {
  const chips = [];
  if (routed) chips.push(chip(rehearsed ? "would go" : decision.reason === "failed-open" ? "sent without a decision" : "routed", decision.reason === "failed-open" ? "warn" : "good"));
  else chips.push(chip(`${rehearsed ? "would be refused" : "refused"} with ${decision.status}`, "bad"));
  if (decision.queued_ms) chips.push(chip(`waited ${milliseconds(decision.queued_ms)}`, "warn"));
  if (decision.decided_ms) chips.push(chip(`decided in ${decision.decided_ms} ms`));
  if (ended) chips.push(chip(ended.status ? `answered ${ended.status} in ${milliseconds(ended.seconds * 1000)}` : "no answer came", ended.status >= 200 && ended.status < 400 ? "" : "bad"));
  if (ended?.served_by && ended.served_by !== decision.endpoint) chips.push(chip(`served by ${names(ended.served_by)}`, "warn"));
  return el(
    "div",
    { class: "verdict" },
    el("p", { class: "whither", text: routed ? decision.endpoint : (decision.reason ?? "refused") }),
    el("p", { class: "chips" }, chips),
    decision.fallbacks?.length ? el("p", { class: "muted", text: `If it fails: ${decision.fallbacks.map(names).join(", then ")}` }) : null,
  );
}

const SHADOW = { refuse: "be refused", wait: "wait", degrade: "get less", offload: "have its prompt computed elsewhere" };

/** Why it went where it went, in sentences; only what the numbers bear out. What they say of pods, decision_words.py says, too. */
export function sentences(decision, names) {
  const said = [];
  if (decision.message) said.push(decision.message);
  if (decision.reason === "failed-open") said.push("The picker could not decide in time, and the pool says FailOpen: the gateway chose by itself.");
  if (decision.admission) said.push(admission(decision.admission, decision.request));
  const pods = decision.candidates ?? [];
  const winner = pods.find((each) => each.endpoint === decision.endpoint);
  if (winner) said.push(...(pods.length === 1 && !decision.candidates_left_out ? ["It was the only pod that could take it."] : comparison(decision, winner, pods, names)));
  if (winner && decision.prompt_tokens) said.push(cache(decision));
  if (decision.prefill) said.push(prefill(decision.prefill, names));
  if (decision.request?.steps?.length) said.push(`Taken from it because its class is under pressure: ${decision.request.steps.join(", ")}.`);
  for (const each of decision.shadow ?? []) said.push(`In shadow, it would ${SHADOW[each.action] ?? each.action} (${each.rule}, ${each.reason}): ${each.words}.`);
  return said.concat((decision.notes ?? []).map((note) => `${note}${/[.!?]$/.test(note) ? "" : "."}`));
}

/** Why a request did not get the class that it asked for (docs/guides/priorities.md). */
function unheard(decision, asked) {
  const { class: got, class_by: by } = decision.request ?? {};
  if (!asked || !got || got === asked || by === "objective") return [];
  return [`The class ${asked} was asked for, the request is ${got} (${by}): clients may lower themselves, and raise themselves only where the policy says trustObjective (trust_objective).`];
}

function admission(words, request) {
  const verdicts = { go: "It would be sent at once", wait: `It would wait in the queue, behind ${plural(words.waiting_requests ?? 0, "request")}`, refuse: "It would be refused" };
  return `${verdicts[words.verdict] ?? words.verdict}. The expected TTFT is ${milliseconds(words.expected_ttft_ms)}; the TTFT SLO of class ${request?.class ?? "?"} is ${milliseconds(words.target_ttft_ms)}.${keeps(words)}`;
}

function keeps({ attainment, judged }) {
  return attainment === null || attainment === undefined ? "" : ` Of the class's last ${plural(judged, "judged request")}, ${Number((attainment * 100).toFixed(1))} % were within all targets.`;
}

/** Who computes the prompt (docs/guides/disaggregation.md). */
function prefill(plan, names) {
  const tokens = `${plan.uncached_tokens} tokens of the prompt are not in this pod's cache`;
  const [here, there] = [milliseconds(plan.local_ms), milliseconds(plan.remote_ms)];
  const times = `first token here after ${here}, by way of ${names(plan.endpoint)} after ${there}, ${milliseconds(plan.transfer_ms)} of it for moving the cache`;
  const race = plan.race ? ` ${plan.races ? "Two prefill pods compute it at once, the first wins" : "They do not race"}: ${plan.race}.` : "";
  return `${plan.where === "remote" ? `${names(plan.endpoint)} computes the prompt` : "This pod computes the prompt itself"}: ${tokens}; ${times} (rule ${plan.rule}: ${plan.why}).${race}`;
}

function comparison(decision, winner, pods, names) {
  const others = pods.filter((each) => each !== winner).sort((a, b) => b.total - a.total);
  const next = others[0];
  if (!next || winner.total == null || next.total == null) return [];
  const margin = winner.total - next.total;
  const told = Object.entries(decision.weights ?? {}).map(([name, weight]) => [name, weight * ((winner.scores?.[name] ?? 0) - (next.scores?.[name] ?? 0))]);
  const ahead = told.filter(([, points]) => points > TELLING).sort((a, b) => b[1] - a[1]).slice(0, 3);
  const behind = told.filter(([, points]) => points < -TELLING).sort((a, b) => a[1] - b[1]).slice(0, 2);
  const listed = (items) => items.map(([name, points]) => `${name} (${points > 0 ? "+" : "−"}${Math.abs(points).toFixed(2)})`).join(", ");
  if (Math.abs(margin) <= TELLING && !ahead.length && !behind.length) {
    return [`${decision.as_good === 2 ? "Two pods were" : `${decision.as_good} pods were`} as good as each other: one of them was taken.`];
  }
  if (margin < -TELLING) return [`${names(next.endpoint)} scored ${(-margin).toFixed(2)} more, but did not get it: ${decision.notes?.length ? "the notes say why" : `strategy ${decision.strategy}`}.`];
  const lead = `Best of ${pods.length + (decision.candidates_left_out ?? 0)}: ${Math.max(0, margin).toFixed(2)} points ahead of ${names(next.endpoint)}`;
  return [`${lead}${ahead.length ? `, for its ${listed(ahead)}` : ""}${behind.length ? `; behind in ${listed(behind)}` : ""}.`];
}

function cache(decision) {
  const [matched, best, all] = [decision.matched_tokens ?? 0, decision.best_matched_tokens ?? 0, decision.prompt_tokens];
  if (isUnread(decision)) return "What the pods have in their caches was not known: the index gave no answer.";
  if (!best) return "No pod is known to have the beginning of this prompt in its cache.";
  const here = matched ? `${exact(matched)} of ${exact(all)} prompt tokens are expected in its cache` : "None of the prompt is in its cache";
  return best > matched ? `${here}; another pod has ${exact(best)}. ${exact(best - matched)} tokens are computed again for a shorter wait.` : `${here}, as many as anywhere.`;
}

function prompt(decision) {
  const all = decision.prompt_tokens;
  const matched = Math.min(decision.matched_tokens ?? 0, all);
  const elsewhere = Math.max(0, Math.min(decision.best_matched_tokens ?? 0, all) - matched);
  return el(
    "div",
    { class: "prompt" },
    el("h3", { text: `The prompt, ${exact(all)} tokens` }),
    stack([{ part: matched / all, kind: "cached" }, { part: elsewhere / all, kind: "elsewhere" }, { part: (all - matched - elsewhere) / all, kind: "new" }]),
    el("p", { class: "legend" }, el("span", { class: "key cached", text: `${exact(matched)} cached here` }), elsewhere ? el("span", { class: "key elsewhere", text: `${exact(elsewhere)} cached elsewhere` }) : null, el("span", { class: "key new", text: `${exact(all - matched - elsewhere)} new` })),
  );
}

function candidates(decision, names, all) {
  const weights = Object.entries(decision.weights ?? {}).filter(([, weight]) => weight > 0);
  const hue = (name) => `hue-${weights.findIndex(([each]) => each === name) % HUES}`;
  // against the best of each scorer: what all of them lack tells nobody apart
  const best = new Map(weights.map(([name]) => [name, Math.max(...decision.candidates.map((pod) => pod.scores?.[name] ?? 0))]));
  const lost = (pod) => weights.map(([name, weight]) => ({ name, points: weight * Math.max(0, best.get(name) - (pod.scores?.[name] ?? 0)) }));
  const sum = (pod) => lost(pod).reduce((total, each) => total + each.points, 0);
  const pods = [...decision.candidates].sort((a, b) => (b.endpoint === decision.endpoint) - (a.endpoint === decision.endpoint) || (b.total ?? 0) - (a.total ?? 0));
  const scored = pods.some((pod) => pod.total != null);
  const most = Math.max(...pods.map(sum), 1e-9);
  const used = weights.filter(([name]) => pods.some((pod) => lost(pod).find((each) => each.name === name).points / most > 0.004));
  const shown = table("Pods that could take it", [{ label: "Pod" }, ...(scored ? [{ label: "Points behind" }, { label: "Total", number: true }] : []), { label: "Cached", number: true }, { label: "Running", number: true }, { label: "Waiting", number: true }, { label: "KV use", number: true }]);
  for (const pod of pods) {
    const mine = pod.endpoint === decision.endpoint;
    const name = el("span", { class: "pod-name" }, names(pod.endpoint), mine ? chip("picked", "good") : null, pod.full ? chip("full", "warn") : null, pod.state && pod.state !== "ready" ? chip(pod.state, "warn") : null, pod.unhealthy ? chip("unhealthy", "bad") : null);
    const loss = el("span", { class: "loss" }, stack(lost(pod).map((each) => ({ part: each.points / most, kind: hue(each.name) }))), el("span", { class: "loss-sum", text: sum(pod) < 0.005 ? "0" : `−${sum(pod).toFixed(2)}` }));
    const row = shown.row(name, ...(scored ? [loss, (pod.total ?? 0).toFixed(2)] : []), pod.held_back ? el("span", { title: pod.held_back, text: `${count(pod.matched_tokens)} *` }) : count(pod.matched_tokens), count(pod.running), `${count(pod.waiting)}${pod.booked_since_report ? ` + ${pod.booked_since_report}` : ""}`, share(pod.kv_usage));
    if (mine) row.classList.add("winner");
    shown.body.append(row);
  }
  return el(
    "section",
    { class: "candidates" },
    el("h3", { text: "Pods that could take it" }),
    scored ? el("p", { class: "muted", text: "The bars show how far each is behind the best of every scorer. Waiting: reported + booked since." }) : null,
    el("p", { class: "legend" }, used.map(([name, weight]) => el("span", { class: `key ${hue(name)}`, title: SCORERS[name] ?? name, text: `${name} × ${weight}` }))),
    shown.node,
    decision.candidates_left_out ? el("p", { class: "muted" }, `${plural(decision.candidates_left_out, "pod")} more. `, all ? el("button", { type: "button", class: "linkish", text: "Show all", on: { click: all } }) : null) : null,
    weights.length ? numbers(pods, weights, names) : null,
  );
}

function numbers(pods, weights, names) {
  const shown = table("Every score, from 0 to 1, before its weight", [{ label: "Pod" }, ...weights.map(([name, weight]) => ({ label: `${name} × ${weight}`, number: true })), { label: "Backlog tokens", number: true }, { label: "Index", number: true }], { hideCaption: false });
  shown.body.append(...pods.map((pod) => shown.row(names(pod.endpoint), ...weights.map(([name]) => (pod.scores?.[name] === undefined ? "?" : pod.scores[name].toFixed(2))), count(pod.backlog_tokens), pod.index_state ?? "ok")));
  return el("details", {}, el("summary", { text: "All scores" }), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Every score" }, shown.node));
}

function leftOut(decision, names) {
  const by = new Map();
  for (const each of decision.rejected) by.set(each.filter, [...(by.get(each.filter) ?? []), names(each.endpoint)]);
  return el(
    "section",
    {},
    el("h3", { text: "Left out by a filter" }),
    el("ul", { class: "plain rejected" }, [...by].map(([words, pods]) => el("li", {}, el("b", { text: words }), el("span", { text: pods.join(", ") })))),
    decision.rejected_left_out ? el("p", { class: "muted", text: `${plural(decision.rejected_left_out, "pod")} more.` }) : null,
  );
}

function missing(decision) {
  if (!decision.degraded?.length) return null;
  return el("section", {}, el("h3", { text: "Decided without" }), el("p", { class: "chips" }, decision.degraded.map((word) => chip(word, "warn"))));
}

function requestFacts(decision) {
  const request = decision.request ?? {};
  const pairs = [
    ["Request", decision.request_id],
    ["At", decision.at ? clock(decision.at) : null],
    ["Path", decision.path],
    ["Model", request.model],
    ["Served as", request.served_model !== request.model ? request.served_model : null],
    ["Adapter", request.adapter],
    ["Arm of the split", request.arm],
    ["Class", request.class ? `${request.class} (${request.class_by})` : null],
    ["Tenant", request.tenant],
    ["Prompts", request.prompts > 1 ? request.prompts : null],
    ["Streamed", request.stream === undefined ? null : request.stream ? "yes" : "no"],
    ["At most", request.max_tokens ? `${exact(request.max_tokens)} tokens` : null],
    ["Strategy", decision.strategy],
  ];
  for (const [name, time] of Object.entries(decision.phases_ms ?? {})) pairs.push([`Time to ${name}`, `${time} ms`]);
  return el("section", {}, el("h3", { text: "The request" }), facts(pairs), el("p", { class: "muted", text: "The prompt is not kept with it." }));
}
