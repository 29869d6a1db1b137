// Numbers, times and names as people read them. Pure.

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value === null || value === undefined ? "?" : Math.abs(value) < 10000 ? whole.format(Math.round(value)) : compact.format(value));
export const exact = (value) => (value === null || value === undefined ? "?" : whole.format(Math.round(value)));
export const share = (value) => (value === null || value === undefined ? "?" : value > 0 && value < 0.01 ? "< 1 %" : `${Math.round(value * 100)} %`);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export function milliseconds(value) {
  if (value === null || value === undefined) return "?";
  if (value < 9.95) return `${Number(value.toFixed(1))} ms`;
  return value < 999.5 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(value < 10000 ? 1 : 0)} s`;
}

export function age(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "?";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h`;
  return `${Math.floor(whole / 86400)} days`;
}

/** The role of a pod that does not do both. */
export const roleOf = (pod) => (pod.role && pod.role !== "both" ? pod.role : "");

export const clock = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");

/** Short names of endpoints: what all have in common (host or port, leading octets) is left out. */
export function shortNames(addresses) {
  const parts = addresses.map((address) => {
    const at = address.lastIndexOf(":");
    return at < 0 ? [address, ""] : [address.slice(0, at), address.slice(at)];
  });
  const hosts = new Set(parts.map(([host]) => host));
  const ports = new Set(parts.map(([, port]) => port));
  const names = new Map();
  const octets = [...hosts].map((host) => host.split("."));
  let common = 0;
  if (hosts.size > 1 && octets.every((each) => each.length === 4)) while (common < 2 && octets.every((each) => each[common] === octets[0][common])) common += 1;
  addresses.forEach((address, i) => {
    const [host, port] = parts[i];
    if (addresses.length > 1 && hosts.size === 1 && port) return names.set(address, port);
    const shown = common >= 2 ? `…${host.split(".").slice(common).join(".")}` : host;
    return names.set(address, ports.size === 1 && addresses.length > 1 ? shown : shown + port);
  });
  return names;
}

// what each scorer looks at; docs/reference/policy.md has the formulas
export const SCORERS = {
  prefix: "tokens found in its cache",
  "recent-prefix": "sent there lately, not yet in the index",
  "prefill-work": "prompt tokens to compute before and for this one",
  "decode-work": "tokens of open requests to read at each step",
  "queue-depth": "requests that wait there",
  "active-requests": "requests in flight there",
  "kv-usage": "cache blocks in use",
  "cache-room": "room for this prompt without throwing others out",
  lora: "the adapter is loaded there",
  session: "the session was there last",
  "memory-bandwidth": "time to read the cache at each step",
  turn: "whose turn it is",
};

const STATES = { ready: "ready", unknown: "unknown", unreachable: "unreachable", "not-ready": "not ready", terminating: "ending" };
export const podState = (pod) => (pod.avoided ? "avoided" : (STATES[pod.state] ?? pod.state));
export const isWell = (pod) => pod.state === "ready" && !pod.avoided;
