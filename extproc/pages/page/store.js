// What the page knows: the last word of each part of the feed, and a short history. Pure but for the clock it is given.

const DECISIONS = 300;
const ENDED = 600;
const OWN_SECONDS = 10;
const SMOOTH = 6; // slices of the load
const LEAST_SLICES = 8; // of latencies that a line is of
const LEAST_PARTS = 12; // slices of the load that a line is of

export function emptyState() {
  return {
    snapshotAt: null, // unix seconds of this machine, when the last thing came
    heardAt: null,
    ahead: 0, // the picker's clock less ours, in seconds
    process: null,
    version: "",
    pool: null,
    pools: [],
    policy: { strategy: "", weights: {}, show_prompt_text: false },
    pods: null,
    classes: null,
    index: null,
    prefixes: null,
    decisions: [], // newest first
    ended: new Map(), // by the decision's id, where it is known
    missed: 0,
    past: null, // the last 15 minutes, as the picker keeps them
    seconds: [], // one a second, of our own: {at, picks}
    docs: "",
    picker: "",
    feed: { state: "connecting" },
  };
}

/** Takes in one event of the feed; `now` is our clock in unix seconds. */
export function take(state, name, data, now) {
  state.heardAt = now;
  if (typeof data.now === "number") state.ahead = data.now - now;
  if (name === "snapshot") snapshot(state, data, now);
  else if (name === "pods") pods(state, data, now);
  else if (name === "pools") state.pools = data.pools;
  else if (name === "classes" || name === "index" || name === "prefixes") state[name] = data;
  else if (name === "history") state.past = data;
  else if (name === "decision") decision(state, data, now);
  else if (name === "ended") ended(state, data);
}

function snapshot(state, data, now) {
  const another = state.process !== data.process_id || state.pool !== data.pool;
  if (another) Object.assign(state, { seconds: [], decisions: [], ended: new Map(), missed: 0 });
  Object.assign(state, {
    snapshotAt: now,
    process: data.process_id,
    version: data.kvmesh,
    pool: data.pool,
    pools: data.pools ?? [],
    policy: data.policy ?? state.policy,
    classes: data.classes ?? null,
    index: data.index ?? null,
    prefixes: data.prefixes ?? null,
    past: data.history ?? null,
    docs: data.docs ?? "",
    picker: data.picker ?? "",
  });
  // what came while nobody listened is not known: the list goes on with what is
  const known = new Set((data.decisions ?? []).map((each) => each.id));
  state.decisions = [...(data.decisions ?? []), ...state.decisions.filter((each) => !known.has(each.id))].slice(0, DECISIONS);
  state.pods = null;
  if (data.pods) pods(state, data.pods, now);
}

function pods(state, data, now) {
  state.pods = data;
  const last = state.seconds.at(-1);
  if (!last || now - last.at > 0.5) state.seconds.push({ at: now, picks: data.totals?.picks ?? null });
  while (state.seconds.length && state.seconds[0].at < now - OWN_SECONDS) state.seconds.shift();
}

function decision(state, data, now) {
  state.missed += data.missed ?? 0;
  state.decisions.unshift({ ...data, heardAt: now });
  if (state.decisions.length > DECISIONS) state.decisions.length = DECISIONS;
}

function ended(state, data) {
  state.ended.set(data.decision_id ?? data.request_id, data);
  if (state.ended.size > ENDED) state.ended.delete(state.ended.keys().next().value);
}

/** What became of a decision, where that is known: request ids are the clients', and may come twice. */
export const endOf = (state, decision) => state.ended.get(decision.id) ?? state.ended.get(decision.request_id) ?? null;

/** Requests routed in each of the last seconds, from the pods' counts: exact, however many events were left out. */
export function rates(state) {
  const found = [];
  for (let i = 1; i < state.seconds.length; i += 1) {
    const [before, after] = [state.seconds[i - 1], state.seconds[i]];
    if (before.picks === null || after.picks === null || after.picks < before.picks) continue;
    found.push((after.picks - before.picks) / Math.max(after.at - before.at, 0.25));
  }
  return found;
}

/** Requests a second, slice by slice of the last 15 minutes, or since the picker began. */
export function pastRates(state) {
  const load = state.past?.load;
  if (!load) return [];
  const requests = sinceBegin(state.past, load.requests);
  return requests.map((_, i) => mean(requests, i) / load.slice_seconds);
}

/** Without what was before the picker began: a line of its first minutes is as wide as any. */
function sinceBegin({ since, load }, values) {
  return values.slice(Math.max(0, Math.min(values.length - LEAST_PARTS, Math.floor((since - load.first_at) / load.slice_seconds))));
}

const window = (values, i) => values.slice(Math.max(0, i - SMOOTH + 1), i + 1);
const sum = (values) => values.reduce((total, each) => total + each, 0);
const mean = (values, i) => sum(window(values, i)) / window(values, i).length;

/** The share of prompt tokens expected in caches, slice by slice and of all 15 minutes; null: there were no prompts. */
export function hitRates(state) {
  const load = state.past?.load;
  if (!load) return { each: [], whole: null };
  const each = load.prompt_tokens.map((_, i) => {
    const prompt = sum(window(load.prompt_tokens, i));
    return prompt ? sum(window(load.cached_tokens, i)) / prompt : null;
  });
  const prompt = sum(load.prompt_tokens);
  return { each: sinceBegin(state.past, each), whole: prompt ? sum(load.cached_tokens) / prompt : null };
}

/** TTFT as the pods measured it, of the model with the most requests: not of pods that only prefill. */
export const podsTtft = (state) => (state.past?.latencies ?? []).filter((each) => each.source === "pods" && each.measure === "ttft" && each.role !== "prefill").sort((a, b) => b.whole.observed - a.whole.observed)[0] ?? null;

/** Its p95, slice by slice. */
export function p95s({ past }, series) {
  const count = series.slices.p95_ms.length;
  return series.slices.p95_ms.slice(Math.max(0, Math.min(count - LEAST_SLICES, Math.floor((past.since - past.first_at) / past.slice_seconds))));
}

/** Refused requests of the last 15 minutes, slice by slice. */
export const refusedLately = (state) => (state.past ? sinceBegin(state.past, state.past.load.refused) : []);
