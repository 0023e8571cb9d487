// Sets the colour scheme before the first paint; a classic script because modules run too late for that.
(() => {
  try {
    // What the page stored under the program's old name, chats above all.
    for (const old of Object.keys(localStorage).filter((name) => name.startsWith("treeflash."))) {
      const name = old.replace("treeflash.", "bough.");
      const text = localStorage.getItem(old);
      localStorage.removeItem(old);
      if (localStorage.getItem(name) === null) localStorage.setItem(name, text);
    }
    const choice = localStorage.getItem("bough.theme");
    if (choice === "light" || choice === "dark") document.documentElement.dataset.theme = choice;
  } catch {
    // Storage is blocked: use the system's scheme.
  }
})();
