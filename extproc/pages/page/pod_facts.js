// All that is known of one pod, for the sheet.

import { bar } from "./charts.js";
import { chip, el, facts, table } from "./dom.js";
import { troubleOf } from "./pod_trouble.js";
import { age, clock, count, exact, isWell, milliseconds, podState, roleOf, share } from "./words.js";

const known = (value, show) => (value === null || value === undefined ? null : show(value));

/** `open(decision)` shows a decision. */
export function podFacts(address, open) {
  return (state) => {
    const pod = state.pods?.pods.find((each) => each.address === address);
    if (!pod) return el("p", { text: "This pod is no longer in the pool." });
    const lately = state.decisions.filter((each) => each.endpoint === address).slice(0, 8);
    return el(
      "div",
      { class: "pod-facts" },
      el("p", { class: "chips" }, chip(podState(pod), isWell(pod) ? "good" : "bad"), roleOf(pod) ? chip(`role ${roleOf(pod)}`) : null, pod.index_state ? chip(`index ${pod.index_state}`, pod.index_state === "live" ? "good" : "warn") : chip("not in the index", "warn")),
      stopped(pod, state),
      pod.index_reason ? el("p", { text: `Index: ${pod.index_reason}` }) : null,
      el("div", { class: "gauge" }, el("span", { text: "KV use" }), bar(pod.kv_usage, "load"), el("b", { text: share(pod.kv_usage) })),
      el("div", { class: "gauge" }, el("span", { text: "Hit rate" }), bar(pod.hit_rate, "cache"), el("b", { text: share(pod.hit_rate) })),
      facts([
        ["Running", exact(pod.running)],
        ["Waiting there", exact(pod.waiting)],
        ["In flight from this picker", exact(pod.bookings)],
        ["Picked", `${exact(pod.picks)} (${share(pod.share)})`],
        ["Cached", `${exact(pod.cached_blocks)} blocks${pod.cached_tokens ? `, ${count(pod.cached_tokens)} tokens` : ""}`],
        ["Tiers", Object.entries(pod.tiers ?? {}).map(([tier, blocks]) => `${tier} ${exact(blocks)}`).join(", ")],
        ["Tokens a block", known(pod.block_tokens, exact)],
        ["Prefill speed", known(pod.prefill_tokens_per_second, (rate) => `${count(rate)} tokens/s`)],
        ["Inter-token time", known(pod.inter_token_ms, (time) => `${time} ms`)],
        ["TTFT estimate is off by", known(pod.ttft_estimate_error_ms, milliseconds)],
        ["Longest context", known(pod.max_model_len, (tokens) => `${exact(tokens)} tokens`)],
        ["Models", (pod.models ?? []).join(", ")],
        ["Adapters", (pod.adapters ?? []).join(", ")],
      ]),
      sources(state, address),
      lately.length ? el("h3", { text: "Sent there last" }) : null,
      lately.length ? el("ul", { class: "plain" }, lately.map((each) => el("li", {}, el("button", { type: "button", class: "linkish", on: { click: () => open(each) } }, `${clock(each.at)}  ${each.request?.model ?? ""}`, el("span", { text: each.prompt_tokens ? `${count(each.matched_tokens)} of ${count(each.prompt_tokens)} tokens cached` : "" }))))) : null,
    );
  };
}

function stopped(pod, state) {
  const trouble = troubleOf(pod, { now: Date.now() / 1000 + state.ahead, pool: state.pool });
  if (!trouble) return null;
  return el("section", { class: "stopped", "aria-label": "Why it gets no requests" }, el("p", {}, el("b", { text: `${podState(pod)} ${trouble.since}`.trim() })), el("p", { text: trouble.why }), el("p", { text: trouble.next }));
}

function sources(state, address) {
  const found = (state.index?.sources ?? []).filter((each) => each.endpoint === address);
  if (!found.length) return null;
  const shown = table("Event streams of this pod", [{ label: "Stream" }, { label: "State" }, { label: "Blocks", number: true }, { label: "Last event", number: true }], { hideCaption: false });
  const now = Date.now() / 1000 + state.ahead;
  shown.body.append(...found.map((each) => shown.row(`rank ${each.dp_rank}, ${each.tier ?? "tier unknown"}`, each.reason ? `${each.state}: ${each.reason}` : each.state, exact(each.cached_blocks), each.last_batch_at ? `${age(now - each.last_batch_at)} ago` : "never")));
  return shown.node;
}
