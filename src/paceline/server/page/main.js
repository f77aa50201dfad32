// The frame: tabs, router by hash (#/live?route=x), theme, key dialog. Views are modules of views/.

import { ApiError, key, makeApi } from "./api.js";
import { fill, h, prose } from "./dom.js";
import { VIEWS } from "./views/index.js";

const $ = (id) => document.getElementById(id);
const content = $("content");
const api = makeApi(askForKey);

let about = null; // of the server, once it is known
let views = VIEWS; // those that this server has
let unmount = null;
let current = 0; // counts navigations: a slow view must not draw over a later one

function askForKey(reason = "") {
  const dialog = $("key-dialog"), field = $("key-value");
  if (reason) $("key-reason").textContent = reason;
  field.value = "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "save" && field.value.trim();
      if (given) key.set(given);
      field.value = "";
      resolve(Boolean(given));
    }, { once: true });
  });
}

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { view: views.find((view) => view.name === name) ?? views[0], rest: rest.map(decodeURIComponent), params: new URLSearchParams(query) };
}

async function navigate() {
  const turn = (current += 1);
  load(route().view).catch(() => {}); // while the server is asked what it is
  const problem = await described();
  if (turn !== current) return;
  const { view, rest, params } = route();
  for (const tab of $("tabs").children) {
    const chosen = tab.dataset.view === view.name;
    if (chosen) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
    if (chosen) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  document.title = `${view.title} · paceline`;
  unmount?.();
  unmount = null;
  const root = h("div", { class: `view view-${view.name}` });
  fill(content, root);
  try {
    if (problem) throw problem;
    const module = await load(view);
    if (turn !== current) return;
    const ended = await module.mount(root, { ...api, about, rest, params, announce, showError: (error) => showError(root, error) });
    if (turn === current) unmount = ended ?? null;
    else ended?.();
  } catch (error) {
    if (turn !== current) return;
    if (!root.querySelector("h1")) root.append(h("h1", { text: view.title }));
    showError(root, error, true);
  }
}

const load = (view) => import(`./views/${view.name}.js`);

const showTabs = () => fill($("tabs"), views.map((view) => h("a", { href: `#/${view.name}`, data: { view: view.name }, text: view.title })));

/** Asks once for what the server is; the error where that fails. */
async function described() {
  try { about ??= await describe(); } catch (error) { return error; }
  return null;
}

async function describe() {
  const found = await api.get("/page/about");
  $("model").textContent = found.model;
  $("model").hidden = false;
  $("key").hidden = !key.get();
  views = found.views ? VIEWS.filter((view) => found.views.includes(view.name)) : VIEWS;
  showTabs();
  return found;
}

/** A sentence in the view, above what it shows; the next one replaces it. null: none. whole: there is no view without it. */
function showError(root, error, whole = false) {
  root.querySelector(":scope > .error")?.remove();
  if (error === null || error.name === "AbortError") return;
  if (!(error instanceof ApiError)) console.error(error);
  const text = error instanceof ApiError ? error.message : "The page has an error. The browser's console says more.";
  const button = (name, onclick) => h("button", { type: "button", text: name, onclick });
  const again = error.status === 401 ? button("Enter a key", enterKey) : whole ? button("Try again", navigate) : null;
  root.prepend(h("div", { class: "error", role: "alert" }, h("span", {}, prose(text)), again));
}

const announce = (text) => { $("status").textContent = text; };

async function enterKey() {
  if (await askForKey()) { about = null; navigate(); }
}

// Theme: the system's, light, dark.
const THEMES = ["system", "light", "dark"];
const themeNow = () => document.documentElement.dataset.theme ?? "system";
function showTheme() {
  const names = { system: "◐", light: "○", dark: "●" };
  $("theme").textContent = names[themeNow()];
  $("theme").setAttribute("aria-label", `Theme: ${themeNow()}`);
  $("theme").title = `Theme: ${themeNow()}`;
}
$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(themeNow()) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try { localStorage.setItem("paceline-theme", next); } catch { /* storage is off: for this page only */ }
  showTheme();
});

document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); content.focus(); });
$("key").addEventListener("click", enterKey);
$("key-cancel").addEventListener("click", () => $("key-dialog").close("cancel"));
showTabs();
showTheme();
window.addEventListener("hashchange", navigate);
navigate();
