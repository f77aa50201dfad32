// The server: its model, and the drafters with their colours.

import { h, panel } from "../dom.js";
import { number } from "../format.js";

export function mount(root, { about }) {
  const facts = [
    ["Model", about.model],
    ["Longest context", `${number(about.max_model_len)} tokens`],
    ["Longest draft", `${about.max_draft} tokens`],
    ["Default drafters", about.default_drafters.join(", ") || "none"],
    ["Fingerprint", about.fingerprint],
    ["paceline", about.version],
  ];
  root.append(
    h("h1", { text: "This server" }),
    panel("Model", h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", { text: name }), h("dd", { text: value })]))),
    panel("Drafters", h("ul", { class: "legend long" },
      h("li", {}, h("span", { class: "swatch s-target", text: "target" }), h("span", { text: "the model itself: a pass each" })),
      about.drafters.filter(({ name }) => name !== "none").map(({ name, about: text }) =>
        h("li", {}, h("span", { class: `swatch s-${name}`, text: name }), h("span", { text })))),
    { note: "a token has the colour of the drafter that proposed it" }),
    panel("For programs", h("ul", { class: "links" },
      [["/openapi.json", "the API"], ["/metrics", "Prometheus metrics"], ["/v1/models", "the models"], ["/health", "health"]].map(
        ([path, text]) => h("li", {}, h("a", { href: path }, h("code", { text: path })), ` ${text}`)))),
  );
}
