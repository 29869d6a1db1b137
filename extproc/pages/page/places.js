// What is open above a view: a pod, a prefix, a class, a decision. The address says which (route.js).

import { address, ask } from "./ask.js";
import { el, set, text } from "./dom.js";
import { explanation } from "./explanation.js";
import { podFacts } from "./pod_facts.js";
import { hashOf, leave, open, placeOf } from "./route.js";
import { closeSheet, fillSheet, isOpen, onClose, openSheet } from "./sheet.js";
import { endOf } from "./store.js";
import { classFacts } from "./view_latency.js";
import { prefixFacts } from "./view_prefixes.js";
import { clock } from "./words.js";

/** `below()` names the view that is drawn; `moved()` is called when the address has been changed from here. */
export class Places {
  #app;
  #state;
  #below;
  #moved;
  #known = new Map(); // decisions that were opened, by id: the list forgets them sooner
  #opened = ""; // the place whose sheet is open

  constructor(app, { below, moved }) {
    this.#app = app;
    this.#state = app.state;
    this.#below = below;
    this.#moved = moved;
    onClose(() => this.#closed());
  }

  openDecision(decision) {
    this.#known.set(decision.id, decision);
    this.open("decisions", decision.id);
  }

  open(view, id) {
    open(view, id, this.#below());
    this.arrive();
    this.#moved();
  }

  /** Opens or closes the sheet, as the address says. */
  arrive() {
    const { view, id } = placeOf(location.hash);
    const show = id ? this.#sheetOf(view) : null;
    const place = show ? hashOf(view, id) : "";
    if (place === this.#opened && Boolean(place) === isOpen()) return;
    this.#opened = place;
    if (show) show(id);
    else closeSheet();
  }

  #sheetOf(view) {
    const state = this.#state;
    if (view === "pods") return (name) => openSheet(name, podFacts(name, this.#app.openDecision), state, { live: true });
    if (view === "prefixes") return (id) => openSheet("A prefix", prefixFacts(id), state);
    if (view === "classes") return (name) => openSheet(`Class ${name}`, classFacts(name, this.#app), state, { live: true });
    if (view === "decisions") return (id) => this.#findDecision(id);
    return null;
  }

  #closed() {
    if (!this.#opened) return; // the address has changed first
    this.#opened = "";
    leave();
    this.#moved();
  }

  async #findDecision(id) {
    const found = this.#state.decisions.find((each) => each.id === id) ?? this.#known.get(id);
    if (found) return this.#showDecision(found);
    openSheet("A decision", () => el("p", { text: "Asking the picker …" }), this.#state);
    const isStill = () => this.#opened === hashOf("decisions", id);
    let words = "This picker does not know the decision: it remembers the last 200 of a pool (50 of one of several), and those of other pickers are at theirs.";
    try {
      const [decision] = await this.#ask(id);
      if (decision && isStill()) return this.#showDecision(decision);
    } catch (error) {
      words = error.message;
    }
    return isStill() ? fillSheet(el("p", { text: words })) : undefined;
  }

  async #ask(id) {
    const found = await ask(address("/v1/decisions", { decision_id: id, limit: 1, pool: this.#state.pool }));
    return found.filter((each) => each.id === id); // a picker of an older version knows no ids
  }

  #showDecision(decision) {
    const state = this.#state;
    const named = (each) => this.#app.names(state).get(each) ?? each;
    const shown = (each, more) => explanation(each, { names: named, ended: endOf(state, decision), ...more });
    const all = async (event) => {
      set(event.target, { "aria-disabled": "true" });
      try {
        const [whole] = await this.#ask(decision.id);
        if (this.#opened !== hashOf("decisions", decision.id)) return; // something else was opened meanwhile
        if (whole) fillSheet(shown({ ...decision, ...whole, candidates_left_out: 0, rejected_left_out: 0 }));
        else text(event.target, "The picker has forgotten it");
      } catch (error) {
        text(event.target, error.message);
      }
    };
    openSheet(`Decision at ${clock(decision.at)}`, () => shown(decision, { all }), state);
  }
}
