// Starts the page: connects the feed, the store and the views, and says how the connection is.

import { keepToken, takeToken } from "./ask.js";
import { el, set, text } from "./dom.js";
import { Feed } from "./feed.js";
import { Places } from "./places.js";
import { placeOf, viewBelow } from "./route.js";
import { updateSheet } from "./sheet.js";
import { emptyState, take } from "./store.js";
import { classesView } from "./view_classes.js";
import { decisionsView } from "./view_decisions.js";
import { indexView, troubles } from "./view_index.js";
import { latencyView } from "./view_latency.js";
import { podsView } from "./view_pods.js";
import { prefixesView } from "./view_prefixes.js";
import { tryView } from "./view_try.js";
import { age, clock, exact, isWell, plural, shortNames } from "./words.js";

const REDRAW_MILLISECONDS = 250; // calm for the eye, and for the machine
const SAY_SECONDS = 15; // screen readers hear no more than one sentence in so long
const VIEWS = { pods: ["Pods", podsView], prefixes: ["Prefixes", prefixesView], decisions: ["Decisions", decisionsView], classes: ["Classes", classesView], latency: ["Latency", latencyView], index: ["Index", indexView], try: ["Try a prompt", tryView] };
const FEED_WORDS = { connecting: "Connecting", live: "Live", lost: "Disconnected", paused: "Paused", locked: "Locked", forbidden: "Closed" };

const at = (id) => document.getElementById(id);
const root = document.documentElement;
const state = emptyState();
const views = new Map();
const seconds = () => Date.now() / 1000;

const app = {
  state,
  names: memoNames(),
  lock: (why) => feedState({ state: "locked", why }),
  openPod: (name) => places.open("pods", name),
  openPrefix: (id) => places.open("prefixes", id),
  openClass: (name) => places.open("classes", name),
  openDecision: (decision) => places.openDecision(decision),
};
const places = new Places(app, { below: current, moved: drawTitle });

function memoNames() {
  let known = null;
  let names = new Map();
  return (now) => {
    const addresses = (now.pods?.pods ?? []).map((pod) => pod.address).join("\n");
    if (addresses !== known) [known, names] = [addresses, shortNames(addresses ? addresses.split("\n") : [])];
    return names;
  };
}

// ---- drawing -------------------------------------------------------------------------------------------------------

let timer = null;
let drawnAt = 0;

function changed() {
  timer ??= setTimeout(() => requestAnimationFrame(draw), Math.max(0, drawnAt + REDRAW_MILLISECONDS - performance.now()));
}

function draw() {
  timer = null;
  drawnAt = performance.now();
  drawChooser();
  const index = troubles(state);
  at("nav-index").parentElement.hidden = index === 0;
  text(at("nav-index"), index);
  text(at("nav-index-unit"), index === 1 ? " finding" : " findings");
  if (state.snapshotAt !== null && !isLocked()) {
    const name = current();
    if (!views.has(name)) views.set(name, VIEWS[name][1](at(`view-${name}`), app));
    views.get(name).update(state);
    updateSheet(state);
    if (!performance.getEntriesByName("kvmesh-first-view").length) performance.mark("kvmesh-first-view");
  }
  announce();
}

function drawChooser() {
  const pools = state.pools.map((each) => each.pool);
  at("chooser").hidden = pools.length < 2;
  const select = at("pool");
  const words = pools.join("\n");
  if (select.words !== words) {
    select.words = words;
    select.replaceChildren(el("option", { value: "", text: "Choose a pool", disabled: true }), ...state.pools.map((each) => el("option", { value: each.pool, text: each.pool })));
  }
  select.value = state.pool ?? "";
}

const isLocked = () => ["locked", "forbidden"].includes(state.feed.state);

function current() {
  const name = viewBelow();
  return Object.hasOwn(VIEWS, name) ? name : "pods";
}

function drawTitle() {
  document.title = `${placeOf(location.hash).id || VIEWS[current()][0]} · kvmesh`;
}

function show({ focus }) {
  const name = current();
  const isShown = state.snapshotAt !== null && !isLocked() && !(state.pool === null && state.pools.length > 1);
  at("hello").hidden = state.snapshotAt !== null || isLocked();
  for (const each of Object.keys(VIEWS)) at(`view-${each}`).hidden = !isShown || each !== name;
  for (const link of document.querySelectorAll("nav.views a")) set(link, { "aria-current": link.hash === `#/${name}` ? "page" : null });
  drawTitle();
  drawPools();
  drawFooter();
  if (!isShown) return;
  draw();
  places.arrive();
  if (focus) {
    scrollTo(0, 0);
    at(`h-${name}`)?.focus({ preventScroll: true });
  }
}

/** Which program this is, which of several, and where its words are explained. */
function drawFooter() {
  const box = at("foot");
  box.hidden = state.snapshotAt === null || isLocked();
  text(at("foot-version"), state.version ? `kvmesh ${state.version}` : "kvmesh");
  text(at("foot-picker"), state.picker ? `Picker ${state.picker}` : "");
  const docs = /^https:\/\//.test(state.docs) ? state.docs : "";
  for (const link of box.querySelectorAll("a[data-docs]")) set(link, { hidden: !docs, href: docs ? new URL(link.dataset.docs, docs).href : null });
}

/** Where several pools are served and none is chosen: the choice is the page. */
function drawPools() {
  const box = at("pools") ?? at("main").appendChild(el("section", { id: "pools", class: "panel pools", "aria-labelledby": "h-pools" }, el("h1", { id: "h-pools", text: "Pools" }), el("ul", { class: "plain" })));
  const choose = state.snapshotAt !== null && !isLocked() && state.pool === null;
  box.hidden = !choose;
  if (!choose) return;
  if (!state.pools.length) return void box.lastChild.replaceChildren(el("li", { class: "empty", text: "No pool is served yet. Pools appear here as soon as they are found." }));
  box.lastChild.replaceChildren(...state.pools.map((each) => el("li", {}, el("button", { type: "button", class: "pool", on: { click: () => choosePool(each.pool) } }, el("b", { text: each.pool }), el("span", { text: `${exact(each.ready)} of ${plural(each.endpoints, "pod")} ready · ${exact(each.open_requests)} in flight · ${exact(each.waiting)} waiting` }), el("span", { class: "muted", text: [each.model, ...(each.hosts ?? [])].filter(Boolean).join(" · ") })))));
}

function choosePool(name) {
  const there = new URL(location.href);
  there.searchParams.set("pool", name);
  history.replaceState(null, "", there);
  state.snapshotAt = null;
  feed.start(name);
}

// ---- the connection ------------------------------------------------------------------------------------------------

const feed = new Feed({
  onEvent(name, data) {
    const first = state.snapshotAt === null || (name === "snapshot" && (state.feed.state !== "live" || data.pool !== state.pool));
    take(state, name, data, seconds());
    if (first || state.feed.state !== "live") {
      feedState({ state: "live" });
      show({ focus: false });
    } else if (name === "pools" && state.pool === null) drawPools();
    changed();
  },
  onState: feedState,
});

function feedState(next) {
  const before = state.feed.state;
  if (next.state === "connecting" && before === "lost") next = { ...state.feed, trying: true }; // still without data
  state.feed = next;
  root.dataset.feed = next.state;
  text(at("status-text"), FEED_WORDS[next.state]);
  drawBanner();
  if (isLocked() || before === "locked" || before === "forbidden") show({ focus: false });
  at("lock").hidden = next.state !== "locked";
  if (next.state === "locked") {
    text(at("lock-error"), next.why ?? "");
    at("token").focus();
  }
  if (next.state !== before && (next.state === "lost" || before === "lost")) announce(true);
}

function drawBanner() {
  const { state: name, why, retryAt, trying } = state.feed;
  const banner = at("banner");
  banner.hidden = !["lost", "paused", "forbidden"].includes(name);
  at("main").classList.toggle("stale", name === "lost" || name === "paused");
  if (banner.hidden) return;
  const old = state.heardAt === null ? "Nothing has been shown yet." : `What you see is from ${clock(state.heardAt)}, ${age(seconds() - state.heardAt)} ago.`;
  const next = trying ? "Trying again now." : retryAt ? `Next try in ${age(Math.max(0, retryAt - seconds()))}.` : "";
  const words = { lost: `Disconnected: ${why}. ${old} ${next}`, paused: `Paused while nobody looked. ${old}`, forbidden: why ?? "" };
  text(at("banner-text"), words[name]);
  text(at("retry"), name === "paused" ? "Go on" : "Try now");
}

let saidAt = 0;
let said = "";

/** Tells screen readers what has changed for the worse or the better: seldom, and in one sentence. */
function announce(urgent = false) {
  if (!urgent && seconds() - saidAt < SAY_SECONDS) return;
  const words = situation();
  if (words === said) return;
  [said, saidAt] = [words, seconds()];
  text(at("said"), words);
}

function situation() {
  if (state.feed.state === "lost") return `Disconnected. What is shown is from ${state.heardAt ? clock(state.heardAt) : "nowhere yet"}.`;
  if (!state.pods || state.feed.state !== "live") return "";
  const pods = state.pods.pods;
  const ill = pods.filter((pod) => !isWell(pod)).length;
  const found = troubles(state);
  return `Live. ${plural(pods.length, "pod")}, ${ill ? `${ill} not ready` : "all ready"}. ${found ? `${plural(found, "finding")} of the index.` : ""} ${state.classes?.waiting ? "Requests are waiting." : ""}`.trim();
}

// ---- the rest ------------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function theme(next) {
  if (next === "auto") delete root.dataset.theme;
  else root.dataset.theme = next;
  text(at("theme-text"), next[0].toUpperCase() + next.slice(1));
  try {
    if (next === "auto") localStorage.removeItem("kvmesh.theme");
    else localStorage.setItem("kvmesh.theme", next);
  } catch {
    // not kept, then
  }
}

at("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length]));
at("retry").addEventListener("click", () => feed.start());
at("pool").addEventListener("change", (event) => choosePool(event.target.value));
at("lock").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(at("token").value.trim());
  at("token").value = "";
  feed.start();
});
document.querySelector("a.skip").addEventListener("click", (event) => {
  event.preventDefault();
  at("main").focus();
});
addEventListener("hashchange", () => {
  if (/^#token=/.test(location.hash)) {
    takeToken();
    feed.start();
  }
  show({ focus: current() !== focused });
  focused = current();
});
setInterval(() => {
  drawBanner();
  if (state.feed.state === "live") changed(); // ages go on
}, 1000);

let focused = current(); // the view that had the focus last
theme(root.dataset.theme ?? "auto");
show({ focus: false });
feed.start(new URL(location.href).searchParams.get("pool"));
