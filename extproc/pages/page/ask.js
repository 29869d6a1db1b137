// Asks the picker, with the token where there is one. The token is kept by this tab only, and never in a cookie.

const KEY = "kvmesh.token";
const SECONDS = 15;

let token = null;

/** Takes a token from the address (`#token=…`) or from this tab's storage, and clears the address. */
export function takeToken() {
  const given = /^#token=(.+)$/.exec(location.hash);
  if (given) {
    keepToken(decoded(given[1]));
    history.replaceState(null, "", `${location.pathname}${location.search}#/pods`);
    return;
  }
  try {
    token = sessionStorage.getItem(KEY);
  } catch {
    token = null;
  }
}

function decoded(words) {
  try {
    return decodeURIComponent(words);
  } catch {
    return words;
  }
}

export function keepToken(value) {
  token = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // without storage it lives as long as the page
  }
}

export function headers(more = {}) {
  // what no header can carry is no token; the server then says so
  return token !== null && /^[\x21-\x7e]+$/.test(token) ? { ...more, authorization: `Bearer ${token}` } : more;
}

/** What went wrong, in the server's words where it has some. */
export class AskError extends Error {
  constructor(status, message, retryAfterSeconds = null) {
    super(message);
    this.status = status;
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

export async function refusal(response) {
  let words = "";
  try {
    const body = (await response.text()).slice(0, 2000);
    const said = JSON.parse(body).error;
    words = typeof said === "string" ? said : typeof said?.message === "string" ? said.message : "";
  } catch {
    // no JSON: the status says it
  }
  const seconds = Number(response.headers.get("retry-after"));
  return new AskError(response.status, words || `the picker answered ${response.status}`, seconds > 0 ? seconds : null);
}

/** Returns the JSON of a page. Throws AskError. */
export async function ask(path, { method = "GET", body = undefined, more = {} } = {}) {
  let response;
  try {
    response = await fetch(path, { method, body, headers: headers(more), credentials: "omit", cache: "no-store", signal: AbortSignal.timeout(SECONDS * 1000) });
  } catch (error) {
    throw new AskError(0, error.name === "TimeoutError" ? `no answer within ${SECONDS} s` : "the picker cannot be reached");
  }
  if (!response.ok) throw await refusal(response);
  try {
    return await response.json();
  } catch {
    throw new AskError(response.status, "the answer is no JSON");
  }
}

/** An address with its parameters; what is null or empty is left out. */
export function address(path, params) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}
