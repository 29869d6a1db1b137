// A pod that gets no requests: since when, why, and what follows. In sentences.

import { age, clock, isWell } from "./words.js";

const WHY = {
  unreachable: "Nothing listens there",
  unknown: "Its load is not known",
  "not-ready": "Its platform says that it is not ready",
  terminating: "It is ending, and finishes what it has",
};
const every = (seconds) => (seconds < 10 ? `${Number(seconds.toFixed(1))} s` : age(seconds));

/** Returns {since, why, next} of a pod that is not well, null of one that is; `now` is the picker's clock. */
export function troubleOf(pod, { now, pool }) {
  if (isWell(pod)) return null;
  return { since: pod.since ? `since ${clock(pod.since)} (${age(now - pod.since)})` : "", why: why(pod), next: next(pod, now, pool) };
}

function why(pod) {
  const said = [];
  if (pod.state !== "ready") said.push(`${WHY[pod.state] ?? `It is ${pod.state}`}${pod.problem ? `. Last error: ${pod.problem}` : ""}.`);
  if (pod.avoided) said.push(pod.avoided === "cordoned" ? "It is cordoned: the policy keeps new requests away." : `It is avoided: ${pod.avoided}.`);
  return said.join(" ");
}

function next(pod, now, pool) {
  const said = [pod.state === "unknown" && !pod.avoided ? "It counts as busy: it gets a few requests at a time at most." : "It is out of rotation: it gets no new requests."];
  if (pod.state === "unreachable") said.push(`It is asked again every ${every(pod.asked_every_seconds ?? 1)}, and is back in rotation with its first answer, as a new process: what was sent there before counts no more.`);
  if (pod.state === "unknown") said.push(`It is asked again every ${every(pod.asked_every_seconds ?? 1)}; its next report ends this.`);
  if (pod.state === "not-ready") said.push("It is back in rotation when its platform says that it is ready.");
  if (pod.trial_at) said.push(`One request is tried there ${pod.trial_at > now ? `at ${clock(pod.trial_at)}, in ${age(pod.trial_at - now)}` : "next"}; if that fails, it is avoided for twice as long.`);
  else if (pod.avoided && pod.avoided !== "cordoned" && pod.state === "ready") said.push("It is back in rotation when its inter-token time is near that of the others.");
  if (pod.state !== "ready") said.push(pool ? "It is forgotten when it leaves the pool and its last request has ended." : "It stays on this list for as long as --endpoints names it.");
  return said.join(" ");
}
