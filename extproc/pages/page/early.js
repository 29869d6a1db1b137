// Asks for the feed before the rest of the page has come: the picker's first answer and the scripts arrive together.

import { address, headers, takeToken } from "./ask.js";

const FRESH_MILLISECONDS = 8000; // what has been open for longer without being read is not waited for

export const feedRequest = (pool, signal) => fetch(address("/v1/live", { pool }), { headers: headers({ accept: "text/event-stream" }), credentials: "omit", cache: "no-store", signal });

takeToken();
const pool = new URL(location.href).searchParams.get("pool");
const abort = new AbortController();
let early = { pool, abort, response: feedRequest(pool, abort.signal) };
early.response.catch(() => {}); // whoever takes it is told
const forget = setTimeout(() => takeEarly(undefined), FRESH_MILLISECONDS);

/** The request under way for this pool, once: {abort, response}; null where there is none, or another was asked for. */
export function takeEarly(wanted) {
  const found = early;
  early = null;
  clearTimeout(forget);
  if (!found || (wanted !== undefined && (found.pool || null) === (wanted || null))) return found;
  found.abort.abort();
  return null;
}
