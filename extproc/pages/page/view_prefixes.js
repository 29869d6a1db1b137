// What is cached where: the prompts' common beginnings as a tree, by what they bring and what they take.

import { bar, drawStrip, setBar, strip } from "./charts.js";
import { el, facts, keyed, set, table, text } from "./dom.js";
import { age, count, exact, plural, share, shortNames } from "./words.js";

const ROW_HEIGHT = 34; // pixels, as in the style sheet
const DEEPEST = 7;
const THINNEST = 0.4; // percent of the width: less is not drawn
const OPEN_DEPTH = 1; // deeper edges are folded at first
const MOST_ROWS = 200;
const MEASURES = {
  hits: ["Share of hits", (node) => node.hit_tokens ?? 0],
  memory: ["Share of memory", (node) => node.held_blocks ?? 0],
  requests: ["Share of requests", null],
};

export function prefixesView(root, app) {
  const folds = new Map(); // id -> open or not, where somebody has said so
  let measure = "hits";
  const summary = el("p", { class: "lead" });
  const icicle = el("div", { class: "icicle", "aria-hidden": "true" });
  const empty = el("p", { class: "empty" });
  const select = el("select", { id: "measure", on: { change: (event) => ((measure = event.target.value), update(app.state)) } }, Object.entries(MEASURES).map(([key, [label]]) => el("option", { value: key, text: label })));
  const rows = table("Prefixes, the most used first; deeper ones go on where the one above ends", [{ label: "Prefix" }, { label: "Tokens", number: true }, { label: "Requests", number: true }, { label: "Share of hits" }, { label: "Share of memory" }, { label: "Held on" }]);
  const legend = el("p", { class: "legend" }, el("span", { class: "key copies-1", text: "held by few pods" }), el("span", { class: "key copies-3", text: "by some" }), el("span", { class: "key copies-5", text: "by all" }), el("span", { class: "key copies-0", text: "by none, or not known" }));
  const drawing = el("section", { class: "panel", "aria-labelledby": "h-shape" }, el("div", { class: "panel-head" }, el("h2", { id: "h-shape", text: "The shape of the traffic" }), el("div", { class: "tools" }, el("label", { for: "measure", text: "Width" }), select)), icicle, legend);
  const list = el("section", { class: "panel", "aria-labelledby": "h-edges" }, el("h2", { id: "h-edges", text: "Prefixes" }), rows.node);
  root.append(el("header", { class: "view-head" }, el("h1", { id: "h-prefixes", tabindex: "-1", text: "Prefixes" }), summary), empty, drawing, list);

  function update(state) {
    const data = state.prefixes;
    const nodes = data?.nodes ?? [];
    const addresses = (state.pods?.pods ?? []).map((pod) => pod.address);
    const tree = grown(nodes, MEASURES[measure][1]);
    text(summary, lead(data));
    empty.hidden = nodes.length > 0;
    text(empty, nothing(data));
    drawing.hidden = list.hidden = nodes.length === 0;
    drawIcicle(icicle, tree, addresses.length, (node) => open(node));
    const shown = unfolded(tree.roots, folds).slice(0, MOST_ROWS);
    // bars compare the rows with each other; the numbers say what they are of the whole
    const most = { hits: Math.max(1e-9, ...shown.map((node) => node.share_of_hits ?? 0)), memory: Math.max(1e-9, ...shown.map((node) => node.share_of_memory ?? 0)) };
    keyed(rows.body, shown, (node) => node.id, () => makeRow(rows), (row, node) => drawRow(row, node, { addresses, data, most }));
  }

  function makeRow(rows) {
    const part = { fold: el("button", { type: "button", class: "fold" }), name: el("button", { type: "button", class: "linkish prefix-name" }), hits: bar(0, "cache"), hitsWords: el("span"), memory: bar(0, "memory"), memoryWords: el("span"), strip: strip([], new Map()), held: el("span") };
    const row = rows.row(el("span", { class: "edge" }, part.fold, part.name), "", "", el("span", { class: "measure" }, part.hits, part.hitsWords), el("span", { class: "measure" }, part.memory, part.memoryWords), el("span", { class: "measure held" }, part.strip, part.held));
    part.fold.addEventListener("click", () => {
      folds.set(row.node.id, !isOpen(row.node, folds));
      update(app.state);
    });
    part.name.addEventListener("click", () => open(row.node));
    row.bits = part;
    return row;
  }

  function drawRow(row, node, { addresses, data, most }) {
    const part = row.bits;
    row.node = node;
    row.style.setProperty("--depth", String(Math.min(node.depth, 8)));
    const many = node.children.length;
    part.fold.hidden = !many;
    if (many) set(part.fold, { "aria-expanded": String(isOpen(node, folds)), "aria-label": `${plural(many, "continuation")} of ${label(node, data)}` });
    text(part.name, label(node, data));
    part.name.classList.toggle("has-text", Boolean(node.text && data.text_shown));
    text(row.children[1], exact(node.tokens));
    text(row.children[2], share(node.share_of_requests));
    setBar(part.hits, node.share_of_hits / most.hits);
    text(part.hitsWords, share(node.share_of_hits));
    setBar(part.memory, (node.share_of_memory ?? 0) / most.memory);
    text(part.memoryWords, share(node.share_of_memory));
    const held = new Map((node.holders ?? []).map((each) => [each.endpoint, node.blocks ? each.blocks / node.blocks : 1]));
    drawStrip(part.strip, addresses, held);
    text(part.held, node.holders === null ? "not known" : `${exact(held.size + (node.holders_left_out ?? 0))} of ${plural(addresses.length, "pod")}`);
  }

  function open(node) {
    app.openPrefix(node.id);
  }
  return { update };
}

const isOpen = (node, folds) => folds.get(node.id) ?? node.depth < OPEN_DEPTH;

function lead(data) {
  if (!data) return "";
  const seen = data.sampled_share < 1 ? ` ${share(data.sampled_share)} of the requests are looked at.` : "";
  const left = data.left_out ? ` ${plural(data.left_out, "smaller one")} not shown.` : "";
  return `What requests have begun with lately; half of it is forgotten every ${age(data.half_life_seconds)}.${seen}${left} ${data.text_shown ? "" : "Texts are not shown: the policy’s observability.showPromptText is off."}`.trim();
}

function nothing(data) {
  if (!data) return "Waiting for the picker’s first look at the index.";
  if (data.index === "no-tokens") return "This picker has no tokenizer for its models: it knows no prefixes.";
  return "No prompt has been routed lately. Prefixes appear within seconds after the first requests of at least one block.";
}

function label(node, data) {
  const range = `tokens ${exact(node.from_tokens)}–${exact(node.from_tokens + node.tokens)}`;
  return node.text && data?.text_shown ? node.text : `${node.id.slice(0, 8)}  ${range}`;
}

/** Links the nodes and gives each its value: for hits and memory its own and that of all that goes on from it. */
export function grown(nodes, own) {
  const linked = new Map(nodes.map((node) => [node.id, { ...node, children: [], value: 0 }]));
  const roots = [];
  for (const node of linked.values()) {
    const parent = linked.get(node.parent);
    (parent && parent !== node ? parent.children : roots).push(node);
  }
  const order = [];
  const queue = [...roots];
  while (queue.length) {
    const node = queue.pop();
    order.push(node);
    queue.push(...node.children);
  }
  for (const node of order.reverse()) {
    const below = node.children.reduce((sum, child) => sum + child.value, 0);
    node.value = own === null ? Math.max(node.requests ?? 0, below) : own(node) + below;
  }
  return { roots, nodes: order };
}

function unfolded(roots, folds) {
  const shown = [];
  const stack = [...roots].reverse();
  while (stack.length) {
    const node = stack.pop();
    shown.push(node);
    if (isOpen(node, folds)) stack.push(...[...node.children].reverse());
  }
  return shown;
}

function drawIcicle(box, tree, pods, open) {
  const whole = tree.roots.reduce((sum, node) => sum + node.value, 0);
  const cells = [];
  const place = (node, left, width, level) => {
    if (level >= DEEPEST || width < THINNEST) return;
    cells.push({ node, left, width, level });
    let at = left;
    for (const child of node.children) {
      const wide = node.value ? (width * child.value) / node.value : 0;
      place(child, at, wide, level + 1);
      at += wide;
    }
  };
  let at = 0;
  for (const node of whole ? tree.roots : []) {
    const wide = (100 * node.value) / whole;
    place(node, at, wide, 0);
    at += wide;
  }
  box.style.height = `${ROW_HEIGHT * (1 + Math.max(0, ...cells.map((cell) => cell.level)))}px`;
  keyed(box, cells, (cell) => cell.node.id, () => {
    const node = el("div", { class: "cell" }, el("span"));
    node.addEventListener("click", () => open(node.edge));
    return node;
  }, (element, { node, left, width, level }) => {
    element.edge = node;
    const holders = (node.holders?.length ?? 0) + (node.holders_left_out ?? 0);
    const copies = holders && pods ? Math.max(1, Math.min(5, Math.ceil((5 * holders) / pods))) : 0;
    element.className = `cell copies-${copies}`;
    set(element, { vars: { "--left": `${left}%`, "--wide": `${width}%`, "--top": `${level * ROW_HEIGHT}px` }, title: `${node.text ?? node.id} · ${exact(node.tokens)} tokens · ${share(node.share_of_hits)} of hits · ${node.holders ? plural(holders, "pod") : "pods not known"}` });
    text(element.firstChild, width < 4 ? "" : (node.text ?? `${count(node.tokens)} tokens`));
  });
}

/** One prefix in full, for the sheet. */
export const prefixFacts = (id) => (state) => {
  const node = state.prefixes?.nodes.find((each) => each.id === id);
  if (!node) return el("p", { text: "It is not among the most used prefixes now, or another picker, or this one before it was started again, has named it: such names mean something to one process only." });
  return factsOf(node, state);
};

function factsOf(node, state) {
  const addresses = (state.pods?.pods ?? []).map((pod) => pod.address);
  const names = shortNames(addresses);
  const now = Date.now() / 1000 + state.ahead;
  const held = table("Pods that hold it", [{ label: "Pod" }, { label: "Blocks", number: true }, { label: "Tiers" }], { hideCaption: false });
  held.body.append(...(node.holders ?? []).map((each) => held.row(names.get(each.endpoint) ?? each.endpoint, `${exact(each.blocks)} of ${exact(node.blocks)}`, Object.entries(each.tiers ?? {}).map(([tier, blocks]) => `${tier} ${exact(blocks)}`).join(", "))));
  return el(
    "div",
    {},
    node.text ? el("blockquote", { text: node.text }) : null,
    facts([
      ["Key", node.id],
      ["Model", node.model],
      ["Adapter", node.adapter],
      ["Tokens", `${exact(node.from_tokens)} to ${exact(node.from_tokens + node.tokens)}, ${plural(node.blocks, "block")}`],
      ["Requests lately", `${count(node.requests)} (${share(node.share_of_requests)})`],
      ["Tokens it saved lately", `${count(node.hit_tokens)} (${share(node.share_of_hits)} of all hits)`],
      ["Blocks held", node.held_blocks === null ? "not known" : `${exact(node.held_blocks)} (${share(node.share_of_memory)} of all)`],
      ["Last seen", `${age(now - node.last_at)} ago`],
    ]),
    node.holders === null ? el("p", { text: "Who holds it is not known: the index cannot be read." }) : node.holders.length ? held.node : el("p", { text: "No pod holds it now." }),
  );
}
