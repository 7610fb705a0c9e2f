// Calls of tools: what the assistant wants, and fields for what the tools return. A person is the tool here.

import { make } from "./dom.js";

/** @typedef {import("./wire.js").Call} Call */

/** Returns arguments as they are read best: indented, where they are JSON. @param {string} text */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/**
 * Returns what shows calls. `send` takes the results; without it they are only shown.
 * @param {Call[]} calls
 * @param {((results: {id: string, name: string, content: string}[]) => void) | null} send
 */
export function callsOf(calls, send) {
  /** @type {HTMLTextAreaElement[]} */
  const fields = [];
  const rows = calls.map((call) => {
    const row = make("div", { className: "call" }, make("p", {}, "calls ", make("code", { textContent: call.name })));
    row.append(make("pre", { textContent: readable(call.arguments), tabIndex: 0, "aria-label": `arguments of ${call.name}` }));
    if (send) {
      const field = make("textarea", { rows: 2, spellcheck: false });
      fields.push(field);
      row.append(make("label", {}, `What ${call.name} returns`, field));
    }
    return row;
  });
  const form = make("form", { className: "asked", "aria-label": "Calls of tools" }, ...rows);
  if (send) form.append(make("button", { type: "submit", textContent: calls.length === 1 ? "Send the result" : "Send the results" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send?.(calls.map((call, at) => ({ id: call.id, name: call.name, content: fields[at].value })));
  });
  return form;
}
