// Elements from data. Nothing here or elsewhere reads HTML: texts become text nodes.

/** Returns an element. `given` are properties, or attributes where a name has a dash. */
export function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Returns an element of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets a text where it is another one: an unchanged one is not laid out again, and keeps a selection. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Fills a table: cells are texts, or [text, class]. Cells that stay the same are not touched. */
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

/** Lets a screen reader say a sentence. */
export function say(text) {
  if (!text.trim()) return;
  said.append(make("p", { textContent: text.trim() }));
  while (said.childElementCount > 20) said.firstElementChild.remove();
}
