// Where the page is, in the address: a view, and perhaps one thing that is open. It survives a reload, and the browser's
// back closes what was opened last.

/** `#/decisions/4f1c` is the decision 4f1c; `#/decisions` is the view alone. */
export function placeOf(hash) {
  const [, view = "", id = ""] = /^#\/([a-z]*)(?:\/(.*))?$/.exec(hash) ?? [];
  return { view, id: decoded(id) };
}

export const hashOf = (view, id) => `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}`;

function decoded(words) {
  try {
    return decodeURIComponent(words);
  } catch {
    return words;
  }
}

/** The view that is drawn: below what is open stays the view from which it was opened. */
export const viewBelow = () => history.state?.below ?? placeOf(location.hash).view;

/** Opens one thing above the view that is shown. */
export function open(view, id, below) {
  if (location.hash === hashOf(view, id)) return;
  const depth = placeOf(location.hash).id ? (history.state?.depth ?? 0) : 0;
  history.pushState({ below, depth: depth + 1 }, "", hashOf(view, id));
}

/** Leaves what is open, however many were opened from each other. */
export function leave() {
  const { view, id } = placeOf(location.hash);
  if (!id) return;
  if (history.state?.depth) history.go(-history.state.depth);
  else history.replaceState(null, "", hashOf(view));
}
