// Sets the colour scheme before the first paint; a classic script because modules run too late for that.
(() => {
  try {
    const choice = localStorage.getItem("bough.theme");
    if (choice === "light" || choice === "dark") document.documentElement.dataset.theme = choice;
  } catch {
    // Storage is blocked: use the system's scheme.
  }
})();
