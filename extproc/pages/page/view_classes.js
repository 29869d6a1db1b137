// Classes of requests: what each is promised, who waits, what is taken from whom, who is refused and why.

import { bar, setBar } from "./charts.js";
import { chip, el, facts, keyed, table, text } from "./dom.js";
import { age, count, exact, milliseconds, plural, share } from "./words.js";

export function classesView(root, app) {
  const summary = el("p", { class: "lead" });
  const rows = table("Classes, the most important first", [{ label: "Class" }, { label: "Priority", number: true }, { label: "TTFT SLO" }, { label: "Inter-token SLO" }, { label: "SLO attainment, 5 min" }, { label: "Queued" }, { label: "Routed lately", number: true }, { label: "Steps in force" }]);
  const refusals = table("Refusals by reason", [{ label: "Reason" }, { label: "Requests", number: true }, { label: "Share" }]);
  const noRefusals = el("p", { class: "empty", text: "None of the last decisions was a refusal." });
  const quotas = el("div");
  const empty = el("p", { class: "empty", text: "No classes yet." });
  root.append(
    el("header", { class: "view-head" }, el("h1", { id: "h-classes", tabindex: "-1", text: "Classes and queues" }), summary),
    el("section", { class: "panel", "aria-labelledby": "h-queues" }, el("h2", { id: "h-queues", text: "Classes" }), empty, rows.node),
    el("div", { class: "halves" }, el("section", { class: "panel", "aria-labelledby": "h-refusals" }, el("h2", { id: "h-refusals", text: "Refusals lately" }), noRefusals, refusals.node), el("section", { class: "panel", "aria-labelledby": "h-quotas" }, el("h2", { id: "h-quotas", text: "Quotas" }), quotas)),
  );

  function update(state) {
    const data = state.classes;
    const classes = data?.classes ?? [];
    const most = Math.max(1, ...classes.map((each) => each.waiting));
    const steps = classes.reduce((sum, each) => sum + (each.in_force?.length ?? 0), 0);
    text(summary, data ? `${data.shadow ? "The policy is in shadow: it refuses, holds back and degrades nothing, and only counts. " : ""}${data.waiting ? `${plural(data.waiting, "request")} waiting` : "Nobody waits"}; ${steps ? `${plural(steps, "step")} of degradation in force` : "no step of degradation in force"}. What happened lately is of the last ${plural(data.remembered ?? 0, "decision")}.` : "");
    empty.hidden = classes.length > 0;
    rows.node.hidden = classes.length === 0;
    keyed(rows.body, classes, (each) => each.class, (each) => makeRow(rows, () => app.openClass(each.class)), (row, each) => drawRow(row, each, most));
    const reasons = Object.entries(data?.refusals ?? {}).filter(([, number]) => number > 0).sort((a, b) => b[1] - a[1]);
    const all = reasons.reduce((sum, [, number]) => sum + number, 0);
    noRefusals.hidden = reasons.length > 0;
    refusals.node.hidden = reasons.length === 0;
    keyed(refusals.body, reasons, ([reason]) => reason, ([reason]) => {
      const part = bar(0, "bad");
      const row = refusals.row(reason, "", el("span", { class: "measure" }, part, el("span")));
      row.bar = part;
      return row;
    }, (row, [, number]) => {
      text(row.children[1], exact(number));
      setBar(row.bar, number / all);
      text(row.bar.nextSibling, share(number / all));
    });
    drawQuotas(quotas, data?.quotas);
  }
  return { update, app };
}

function makeRow(rows, open) {
  const part = { name: el("button", { type: "button", class: "linkish strong-name" }), shed: el("span"), wait: bar(0, "wait"), waiting: el("span"), steps: el("span", { class: "chips" }) };
  part.name.addEventListener("click", open);
  const row = rows.row(el("span", { class: "pod-name" }, part.name, part.shed), "", "", "", "", el("span", { class: "measure" }, part.wait, part.waiting), "", part.steps);
  row.bits = part;
  for (const cell of [row.children[2], row.children[3]]) cell.classList.add("piece");
  return row;
}

function drawRow(row, each, most) {
  const part = row.bits;
  text(part.name, each.class);
  if (Boolean(part.shed.firstChild) !== each.sheddable) part.shed.replaceChildren(...(each.sheddable ? [chip("may be refused")] : []));
  text(row.children[1], exact(each.priority).replace("-", "−"));
  text(row.children[2], each.target_ttft_ms ? milliseconds(each.target_ttft_ms) : "–");
  text(row.children[3], each.target_inter_token_ms ? milliseconds(each.target_inter_token_ms) : "–");
  text(row.children[4], attained(each));
  setBar(part.wait, each.waiting / most);
  text(part.waiting, `${count(each.waiting)}${each.waiting_for_pod ? ` (${count(each.waiting_for_pod)} for the first pod)` : ""}`);
  text(row.children[6], count(each.routed));
  const steps = (each.in_force ?? []).map((step) => `${step.step}${step.model_pool ? ` for ${step.model_pool}` : ""}, ${age(step.since_seconds)}, pressure ${Number(step.pressure ?? 0).toFixed(1)}`);
  const words = steps.join("\n");
  if (part.steps.words !== words) part.steps.replaceChildren(...(steps.length ? steps.map((step) => chip(step, "warn")) : [el("span", { class: "muted", text: "none" })]));
  part.steps.words = words;
}

/** The share of its judged requests that were within all targets (docs/guides/promises.md). */
function attained(each) {
  const wanted = each.objective ? `, promised ${percent(each.objective)}` : "";
  return each.attainment === null || each.attainment === undefined ? `–${wanted}` : `${percent(each.attainment)} of ${count(each.judged)} judged${wanted}`;
}

const percent = (part) => `${Number((part * 100).toFixed(1))} %`;

function drawQuotas(box, quotas) {
  const words = JSON.stringify(quotas ?? null);
  if (box.words === words) return;
  box.words = words;
  if (!quotas || !quotas.quotas) return void box.replaceChildren(el("p", { class: "empty", text: "No quota is set." }));
  box.replaceChildren(
    quotas.problem ? el("p", { class: "problem" }, chip("error", "bad"), ` ${quotas.problem}`) : "",
    facts([
      ["Quotas", exact(quotas.quotas)],
      ["Tenants and models counted", exact(quotas.keys)],
      ["Open requests under a quota", exact(quotas.open_requests)],
      ["Shares held by this picker", exact(quotas.leases)],
      ["Not written yet", exact(quotas.unwritten_keys)],
    ]),
  );
}
