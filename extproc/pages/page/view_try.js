// Try a prompt: what the picker would do with it now. Nothing is sent to a pod, booked or kept.

import { address, ask } from "./ask.js";
import { el, set, text } from "./dom.js";
import { explanation } from "./explanation.js";

const PATHS = [["/v1/chat/completions", "Chat"], ["/v1/completions", "Completion"], ["raw", "Whole body (JSON)"]];
const RAW_PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];
const OBJECTIVE = "x-gateway-inference-objective";

export function tryView(root, app) {
  const models = el("datalist", { id: "models" });
  const kind = el("select", { id: "try-kind", on: { change: () => arrange() } }, PATHS.map(([value, label]) => el("option", { value, text: label })));
  const path = el("select", { id: "try-path" }, RAW_PATHS.map((value) => el("option", { value, text: value })));
  const model = el("input", { id: "try-model", list: "models", spellcheck: "false", autocomplete: "off" });
  const kinds = el("select", { id: "try-class" }, el("option", { value: "", text: "as the policy finds" }));
  const system = el("textarea", { id: "try-system", rows: "3" });
  const prompt = el("textarea", { id: "try-prompt", rows: "6", required: true });
  const raw = el("textarea", { id: "try-raw", rows: "12", spellcheck: "false", class: "mono" });
  const send = el("button", { type: "submit", class: "strong", text: "Explain" });
  const error = el("p", { class: "error", role: "alert" });
  const told = el("p", { class: "unseen", role: "status" }); // the whole explanation would be too much to be read aloud
  const result = el("div", { class: "result" }, el("p", { class: "empty", text: "The answer appears here: which pod, why, and what every scorer said." }));
  const field = (label, control, name) => el("div", { class: `field ${name ?? ""}` }, el("label", { for: control.id, text: label }), control);
  const fields = { path: field("Path", path), model: field("Model", model), kinds: field("Class asked for", kinds), system: field("System message (optional)", system), prompt: field("Prompt", prompt), raw: field("Request body", raw) };
  const form = el("form", { class: "panel try", "aria-labelledby": "h-ask", on: { submit } }, el("h2", { id: "h-ask", text: "A request" }), el("div", { class: "fields" }, field("Form", kind), fields.path, fields.model, fields.kinds), fields.system, fields.prompt, fields.raw, el("div", { class: "actions" }, send, error), models);
  root.append(
    el("header", { class: "view-head" }, el("h1", { id: "h-try", tabindex: "-1", text: "Try a prompt" }), el("p", { class: "lead", text: "What the picker would do with it now. Nothing is sent to a pod, booked or kept." })),
    el("div", { class: "halves try-halves" }, form, el("section", { class: "panel", "aria-labelledby": "h-answer" }, el("h2", { id: "h-answer", text: "What would happen" }), told, result)),
  );
  arrange();

  function arrange() {
    const whole = kind.value === "raw";
    if (whole && !raw.value) raw.value = JSON.stringify(body(), null, 2);
    fields.path.hidden = fields.raw.hidden = !whole;
    fields.model.hidden = fields.prompt.hidden = whole;
    fields.system.hidden = kind.value !== "/v1/chat/completions";
    prompt.required = !whole;
  }

  function body() {
    if (kind.value === "/v1/completions") return { model: model.value, prompt: prompt.value };
    const messages = system.value ? [{ role: "system", content: system.value }] : [];
    return { model: model.value, messages: [...messages, { role: "user", content: prompt.value }] };
  }

  async function submit(event) {
    event.preventDefault();
    text(error, "");
    set(send, { "aria-disabled": "true" });
    try {
      const whole = kind.value === "raw";
      const asked = kinds.value;
      const answer = await ask(address("/v1/explain", { path: whole ? path.value : kind.value, pool: app.state.pool }), {
        method: "POST",
        body: whole ? raw.value : JSON.stringify(body()),
        more: { "content-type": "application/json", ...(asked ? { [OBJECTIVE]: asked } : {}) },
      });
      const names = app.names(app.state);
      text(told, answer.endpoint ? `It would go to ${answer.endpoint}.` : `It would be refused: ${answer.message ?? answer.reason}.`);
      result.replaceChildren(explanation(answer, { names: (each) => names.get(each) ?? each, rehearsed: true, asked }));
    } catch (problem) {
      if (problem.status === 401) app.lock(problem.message);
      text(error, problem.message);
    } finally {
      set(send, { "aria-disabled": null });
    }
  }

  function update(state) {
    const known = [...new Set((state.pods?.pods ?? []).flatMap((pod) => [...(pod.models ?? []), ...(pod.adapters ?? [])]))].slice(0, 200);
    const words = known.join("\n");
    if (models.words !== words) {
      models.words = words;
      models.replaceChildren(...known.map((name) => el("option", { value: name })));
      if (!model.value && known.length) model.value = known[0];
    }
    const classes = (state.classes?.classes ?? []).map((each) => each.class);
    const options = classes.join("\n");
    if (kinds.words !== options) {
      const chosen = kinds.value;
      kinds.words = options;
      kinds.replaceChildren(el("option", { value: "", text: "as the policy finds" }), ...classes.map((name) => el("option", { value: name, text: name })));
      kinds.value = classes.includes(chosen) ? chosen : "";
    }
  }
  return { update };
}
