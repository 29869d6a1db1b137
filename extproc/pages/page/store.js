// What the page knows: the last word of each part of the feed, and a short history. Pure but for the clock it is given.

const DECISIONS = 300;
const ENDED = 600;
const HISTORY_SECONDS = 120;

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
    history: [], // one a second: {at, picks, prompt, matched, refused}
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
  else if (name === "decision") decision(state, data, now);
  else if (name === "ended") ended(state, data);
}

function snapshot(state, data, now) {
  const another = state.process !== data.process_id || state.pool !== data.pool;
  if (another) Object.assign(state, { history: [], decisions: [], ended: new Map(), missed: 0 });
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
  });
  // what came while nobody listened is not known: the list goes on with what is
  const known = new Set((data.decisions ?? []).map((each) => each.id));
  state.decisions = [...(data.decisions ?? []), ...state.decisions.filter((each) => !known.has(each.id))].slice(0, DECISIONS);
  state.pods = null;
  if (data.pods) pods(state, data.pods, now);
}

function pods(state, data, now) {
  state.pods = data;
  const last = state.history.at(-1);
  if (!last || now - last.at > 0.5) state.history.push({ at: now, picks: data.totals?.picks ?? null, running: data.totals?.running ?? 0, prompt: 0, matched: 0, refused: 0, seen: 0 });
  while (state.history.length && state.history[0].at < now - HISTORY_SECONDS) state.history.shift();
}

function decision(state, data, now) {
  state.missed += data.missed ?? 0;
  state.decisions.unshift({ ...data, heardAt: now });
  if (state.decisions.length > DECISIONS) state.decisions.length = DECISIONS;
  const second = state.history.at(-1);
  if (!second) return;
  second.seen += 1;
  second.prompt += data.prompt_tokens ?? 0;
  second.matched += data.matched_tokens ?? 0;
  if (data.endpoint === null) second.refused += 1;
}

function ended(state, data) {
  state.ended.set(data.decision_id ?? data.request_id, data);
  if (state.ended.size > ENDED) state.ended.delete(state.ended.keys().next().value);
}

/** What became of a decision, where that is known: request ids are the clients', and may come twice. */
export const endOf = (state, decision) => state.ended.get(decision.id) ?? state.ended.get(decision.request_id) ?? null;

/** Requests routed in each second of the last two minutes, from the pods' counts: exact, however many were left out. */
export function rates(state) {
  const found = [];
  for (let i = 1; i < state.history.length; i += 1) {
    const [before, after] = [state.history[i - 1], state.history[i]];
    if (before.picks === null || after.picks === null || after.picks < before.picks) continue;
    found.push((after.picks - before.picks) / Math.max(after.at - before.at, 0.25));
  }
  return found;
}

/** The share of prompt tokens that decisions expected in a cache, second by second and as a whole; null: no prompts. */
export function hitShares(state) {
  const known = state.decisions.slice(0, 50).filter((each) => each.prompt_tokens);
  const seen = state.history.filter((each) => each.prompt > 0);
  const sum = (items, name) => items.reduce((total, each) => total + (each[name] ?? 0), 0);
  if (seen.length) return { each: smooth(state.history), whole: sum(seen, "matched") / sum(seen, "prompt"), of: "the last two minutes" };
  if (known.length) return { each: [], whole: sum(known, "matched_tokens") / sum(known, "prompt_tokens"), of: "the last decisions" };
  return { each: [], whole: null, of: "" };
}

function smooth(history) {
  const shares = [];
  for (let i = 0; i < history.length; i += 1) {
    const window = history.slice(Math.max(0, i - 9), i + 1);
    const prompt = window.reduce((total, each) => total + each.prompt, 0);
    if (prompt) shares.push(window.reduce((total, each) => total + each.matched, 0) / prompt);
  }
  return shares;
}
