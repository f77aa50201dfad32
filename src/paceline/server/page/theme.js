// The chosen theme, before the first paint. No choice: the system's.
(() => {
  let theme = null;
  try { theme = localStorage.getItem("paceline-theme"); } catch { /* storage is off: the system's */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
