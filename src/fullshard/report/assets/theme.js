// Before anything is drawn: light or dark, as the reader chose last, or as the system has it.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try { return localStorage.getItem("fullshard-theme"); } catch { return null; }
  };
  const apply = () => { root.dataset.theme = chosen() || (dark.matches ? "dark" : "light"); };
  apply();
  dark.addEventListener("change", () => { apply(); dispatchEvent(new Event("theme")); });
  window.switchTheme = () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("fullshard-theme", theme); } catch { /* a page from a file may have no storage */ }
    root.dataset.theme = theme;
    dispatchEvent(new Event("theme"));
  };
})();
