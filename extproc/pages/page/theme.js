// Sets the chosen theme before anything is drawn. A plain script, so that the page never flashes in the other one.
(() => {
  try {
    const chosen = localStorage.getItem("kvmesh.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // storage is switched off: the system's theme is used
  }
})();
