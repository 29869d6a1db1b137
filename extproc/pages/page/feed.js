// The live feed: server-sent events read with fetch(), so that the token goes in a header. Reconnects by itself.

import { AskError, refusal } from "./ask.js";
import { feedRequest, takeEarly } from "./early.js";

const SILENT_SECONDS = 15; // the picker sends at least a comment every 10
const CONNECT_SECONDS = 10;
const FIRST_RETRY_SECONDS = 1;
const LAST_RETRY_SECONDS = 30;
const STEADY_SECONDS = 10; // a connection that has held so long begins the back-off anew
const LONGEST_EVENT = 32 * 1024 * 1024;
const HIDDEN_SECONDS = 60; // a tab that nobody looks at stops costing the picker anything

/** Cuts a stream of text into events: `push` returns those that are complete. */
export class EventCutter {
  #rest = "";

  push(piece) {
    this.#rest += piece;
    const events = [];
    let end;
    while ((end = this.#rest.indexOf("\n\n")) >= 0) {
      const event = parsed(this.#rest.slice(0, end));
      this.#rest = this.#rest.slice(end + 2);
      if (event) events.push(event);
    }
    if (this.#rest.length > LONGEST_EVENT) throw new AskError(0, "the feed makes no sense");
    return events;
  }
}

function parsed(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (!data.length) return null;
  try {
    return { name, data: JSON.parse(data.join("\n")) };
  } catch {
    throw new AskError(0, "the feed makes no sense");
  }
}

/** Follows the feed. `onEvent(name, data)`; `onState({state, why, retryAt})`, state as in `data-feed`. */
export class Feed {
  #onEvent;
  #onState;
  #pool = null;
  #abort = null;
  #timer = null;
  #failures = 0;
  #hiddenTimer = null;
  #run = 0;

  constructor({ onEvent, onState }) {
    this.#onEvent = onEvent;
    this.#onState = onState;
    document.addEventListener("visibilitychange", () => this.#looked());
    addEventListener("online", () => this.#timer && this.start());
  }

  /** Connects now, to the pool (null: the only one), and forgets what failed before. */
  start(pool = this.#pool) {
    this.#pool = pool;
    this.#failures = 0;
    this.#connect();
  }

  stop() {
    this.#run += 1;
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#abort?.abort();
  }

  #looked() {
    clearTimeout(this.#hiddenTimer);
    if (document.hidden) {
      this.#hiddenTimer = setTimeout(() => {
        if (!["live", "connecting", "lost"].includes(document.documentElement.dataset.feed)) return;
        this.stop();
        this.#onState({ state: "paused" });
      }, HIDDEN_SECONDS * 1000);
    } else if (document.documentElement.dataset.feed === "paused") {
      this.start();
    }
  }

  async #connect() {
    this.stop();
    const run = this.#run;
    const early = takeEarly(this.#pool);
    const abort = (this.#abort = early?.abort ?? new AbortController());
    const current = () => run === this.#run;
    this.#onState({ state: "connecting" });
    let since = null;
    let failure;
    try {
      await this.#read(abort, early?.response ?? feedRequest(this.#pool, abort.signal), current, () => {
        since ??= performance.now();
      });
      failure = new AskError(0, "the picker ended the connection");
    } catch (error) {
      failure = error instanceof AskError ? error : new AskError(0, abort.signal.reason?.words ?? "the picker cannot be reached");
    }
    if (!current()) return;
    abort.abort();
    if (since !== null && performance.now() - since > STEADY_SECONDS * 1000) this.#failures = 0;
    this.#failed(failure);
  }

  async #read(abort, request, current, opened) {
    let watch = quiet(abort, CONNECT_SECONDS, `no answer within ${CONNECT_SECONDS} s`);
    try {
      const response = await request;
      if (!response.ok) throw await refusal(response);
      const cutter = new EventCutter();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        clearTimeout(watch);
        watch = quiet(abort, SILENT_SECONDS, `nothing has come for ${SILENT_SECONDS} s`);
        const { value, done } = await reader.read();
        if (done || !current()) return;
        for (const event of cutter.push(value)) {
          if (event.name === "bye") throw new AskError(0, event.data.message || event.data.why);
          opened();
          this.#tell(event);
          if (!current()) return;
        }
      }
    } finally {
      clearTimeout(watch);
    }
  }

  /** What goes wrong in drawing is no failure of the connection, and must not hide as one. */
  #tell({ name, data }) {
    try {
      this.#onEvent(name, data);
    } catch (error) {
      reportError(error);
    }
  }

  #failed(error) {
    if (error.status === 401) return this.#onState({ state: "locked", why: error.message });
    if (error.status === 403) return this.#onState({ state: "forbidden", why: error.message });
    const least = error.retryAfterSeconds ?? 0;
    const pause = Math.max(least, Math.min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** this.#failures)) * (0.8 + Math.random() * 0.4);
    this.#failures += 1;
    this.#timer = setTimeout(() => this.#connect(), pause * 1000);
    return this.#onState({ state: "lost", why: error.message, status: error.status, retryAt: Date.now() / 1000 + pause });
  }
}

function quiet(abort, seconds, words) {
  return setTimeout(() => abort.abort({ words }), seconds * 1000);
}
