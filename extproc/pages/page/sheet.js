// The sheet that shows one thing in full: a pod, a decision. A modal dialog, so that the browser keeps the focus in it.

import { text } from "./dom.js";

const sheet = document.getElementById("sheet");
const title = document.getElementById("sheet-title");
const body = document.getElementById("sheet-body");
let refresh = null;
let origin = null;

/** Opens the sheet. `fill(state)` returns its content; with `live` it is made anew as the state changes. */
export function openSheet(words, fill, state, { live = false } = {}) {
  if (!sheet.open) origin = document.activeElement;
  text(title, words);
  body.replaceChildren(fill(state));
  refresh = live ? fill : null;
  if (!sheet.open) sheet.showModal();
  sheet.scrollTop = 0;
  title.focus();
}

export function updateSheet(state) {
  if (!sheet.open || !refresh || body.contains(document.activeElement)) return;
  body.replaceChildren(refresh(state));
}

/** Puts other content in the open sheet, where it still shows what `fill` belongs to. */
export function fillSheet(content) {
  if (sheet.open) body.replaceChildren(content);
}

export const isOpen = () => sheet.open;

export function closeSheet() {
  if (sheet.open) sheet.close();
}

/** `act` is called whenever the sheet has been closed. */
export const onClose = (act) => sheet.addEventListener("close", act);

sheet.addEventListener("close", () => {
  refresh = null;
  body.replaceChildren();
  // what opened it may have left the page meanwhile
  if (!origin?.isConnected) document.getElementById("main").focus({ preventScroll: true });
});
sheet.addEventListener("click", (event) => {
  if (event.target === sheet) sheet.close(); // the backdrop
});
document.getElementById("sheet-close").addEventListener("click", () => sheet.close());
