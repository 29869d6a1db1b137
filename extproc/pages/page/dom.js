// Makes and updates elements. All text goes in as text, never as markup.

/** Makes an element. `props`: class, text, vars ({"--x": "1"}), on ({click}), data ({key}); the rest are attributes. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  set(node, props);
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

export function set(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name === "text") text(node, value);
    else if (name === "vars") for (const [key, item] of Object.entries(value)) node.style.setProperty(key, item);
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "data") for (const [key, item] of Object.entries(value)) node.dataset[key] = item;
    else if (value === true) node.setAttribute(name, "");
    else if (value === false || value === null || value === undefined) node.removeAttribute(name);
    else node.setAttribute(name, value);
  }
  return node;
}

/** Sets the text where it has changed, so that selections and screen readers are left alone. */
export function text(node, value) {
  const words = String(value ?? "");
  if (node.textContent !== words) node.textContent = words;
}

const made = new WeakMap();

/** Keeps one child of `parent` for each item, in order; elements (and the focus in them) survive updates. */
export function keyed(parent, items, keyOf, make, update) {
  const known = made.get(parent) ?? new Map();
  const next = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (next.has(key)) continue;
    const node = known.get(key) ?? make(item);
    update?.(node, item);
    next.set(key, node);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
  for (const [key, node] of known) if (!next.has(key)) node.remove();
  made.set(parent, next);
}

/** One tab stop for many buttons: the arrows move between them by where they are on the screen. */
export function roving(list, selector) {
  const all = () => [...list.querySelectorAll(selector)];
  const choose = (node) => {
    for (const each of all()) each.tabIndex = each === node ? 0 : -1;
  };
  list.addEventListener("focusin", (event) => {
    const node = event.target.closest(selector);
    if (node) choose(node);
  });
  list.addEventListener("keydown", (event) => {
    const nodes = all();
    const at = nodes.indexOf(event.target.closest(selector));
    if (at < 0) return;
    const to = target(nodes, at, event.key);
    if (to === null) return;
    event.preventDefault();
    nodes[to]?.focus();
  });
  return () => {
    const nodes = all();
    if (nodes.length && !nodes.some((node) => node.tabIndex === 0)) choose(nodes[0]);
  };
}

function target(nodes, at, key) {
  if (key === "Home") return 0;
  if (key === "End") return nodes.length - 1;
  if (key === "ArrowRight") return Math.min(at + 1, nodes.length - 1);
  if (key === "ArrowLeft") return Math.max(at - 1, 0);
  if (key !== "ArrowDown" && key !== "ArrowUp") return null;
  const here = nodes[at].getBoundingClientRect();
  const down = key === "ArrowDown";
  const rows = nodes
    .map((node, i) => [i, node.getBoundingClientRect()])
    .filter(([, box]) => (down ? box.top > here.top + 4 : box.top < here.top - 4));
  if (!rows.length) return at;
  const top = (down ? Math.min : Math.max)(...rows.map(([, box]) => box.top));
  const row = rows.filter(([, box]) => Math.abs(box.top - top) < 4);
  return row.reduce((best, each) => (Math.abs(each[1].left - here.left) < Math.abs(best[1].left - here.left) ? each : best))[0];
}

/**
 * A table that is a table for screen readers at every width: on a phone its rows are drawn as cards, and the explicit
 * roles keep what `display` would take away. `columns`: [{label, number, wide}].
 */
export function table(caption, columns, { hideCaption = true } = {}) {
  const head = el("tr", { role: "row" }, columns.map((column) => el("th", { role: "columnheader", scope: "col", class: column.number ? "number" : "", text: column.label })));
  const body = el("tbody", { role: "rowgroup" });
  const node = el(
    "table",
    { role: "table" },
    el("caption", { class: hideCaption ? "unseen" : "", text: caption }),
    el("thead", { role: "rowgroup" }, head),
    body,
  );
  const row = (...cells) =>
    el("tr", { role: "row" }, cells.map((cell, i) => {
      const props = { role: i ? "cell" : "rowheader", class: columns[i].number ? "number" : "", data: { label: columns[i].label } };
      const made = el(i ? "td" : "th", i ? props : { ...props, scope: "row" });
      made.append(cell instanceof Node ? cell : document.createTextNode(cell ?? ""));
      return made;
    }));
  return { node, body, row };
}

/** A list of facts, `[term, value]` each; what is null is left out. */
export function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([term, value]) => el("div", {}, el("dt", { text: term }), el("dd", {}, value instanceof Node ? value : String(value)))));
}

export function chip(words, kind = "") {
  return el("span", { class: `chip ${kind}`, text: words });
}
