// Elements from data. Nothing here or elsewhere reads HTML: texts become text nodes.

/** @typedef {string | Node} Child */

/**
 * Returns an element. `given` are properties, or attributes where a name has a dash.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | number | boolean | null | undefined>} given
 * @param {...Child} children
 */
export function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.includes("-")) element.setAttribute(name, String(value));
    else Object.assign(element, { [name]: value });
  }
  element.append(...children);
  return element;
}

/**
 * Returns an element of a drawing.
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {...Child} children
 */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** Returns an element of the page. @param {string} id */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no ${id}`);
  return found;
}

/**
 * Returns an element of the page that is of this kind.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {string} id
 */
export function the(tag, id) {
  const found = byId(id);
  if (found.localName !== tag) throw new Error(`${id} is no ${tag}`);
  return /** @type {HTMLElementTagNameMap[T]} */ (found);
}

/**
 * Sets a text where it is another one: an unchanged one is not laid out again, and keeps a selection.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @typedef {string | number} Shown */

/**
 * Fills a table: cells are texts, or [text, class]. Cells that stay the same are not touched.
 * @param {HTMLTableElement} table
 * @param {string[]} heads
 * @param {(Shown | [Shown, string])[][]} rows
 */
export function fill(table, heads, rows) {
  if (!table.tHead) {
    table.createTHead().append(make("tr", {}, ...heads.map((head) => make("th", { scope: "col", textContent: head }))));
    table.append(make("tbody"));
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, at) => {
    const row = body.rows[at] ?? body.insertRow();
    cells.forEach((cell, column) => {
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      const element = row.cells[column] ?? row.insertCell();
      setText(element, String(text));
      if (element.className !== kind) element.className = kind;
    });
  });
}

const said = byId("said");

/** Lets a screen reader say a sentence. @param {string} text */
export function say(text) {
  if (!text.trim()) return;
  said.append(make("p", { textContent: text.trim() }));
  while (said.childElementCount > 20) said.firstElementChild?.remove();
}
