// Makes elements of an answer's tree: [kind, attr, children], where a child is a text or such an array.

import { make } from "./dom.js";

/** @typedef {import("./wire.js").Tree} Tree */
/** @typedef {import("./wire.js").Part} Part */

/** @type {Record<string, keyof HTMLElementTagNameMap>} */
const SIMPLE = { p: "p", ul: "ul", li: "li", quote: "blockquote", em: "em", strong: "strong", del: "del", br: "br", hr: "hr", tr: "tr" };
const HEADINGS = /** @type {const} */ (["h3", "h4", "h5", "h6"]);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const SIDES = new Set(["left", "right", "center"]);
/** @type {Map<string, number>} */
const colours = new Map();

/** Returns the number of a node's colour: by its first appearance on this page. @param {string} node */
export function colourOf(node) {
  const known = colours.get(node) ?? colours.size % 8;
  colours.set(node, known);
  return known;
}

export const milliseconds = (/** @type {number | null | undefined} */ ms) => (ms === null || ms === undefined ? "" : `${Math.round(ms)} ms`);

/** Writes the parts of one answer in the colours of their nodes. It goes through the text from the beginning to the end. */
export class Painter {
  constructor() {
    /** @type {Part[]} */
    this.parts = [];
    this.part = -1; // the last one that has its label
    this.goal = 0; // the one that writes the next text
    this.level = 2; // that of the last heading
    this.first = 0; // that of the block's beginning
  }

  /** Begins a block whose first text belongs to this part. Returns its elements. @param {import("./wire.js").Block} block */
  block([part, tree]) {
    this.first = part;
    this.goal = part;
    const made = document.createDocumentFragment();
    made.append(...this.nodes(tree));
    return made;
  }

  /** Returns the labels of the parts up to that of the next text which have none yet. */
  labels() {
    const labels = [];
    while (this.part < this.goal && this.part + 1 < this.parts.length) {
      this.part += 1;
      labels.push(this.label(this.part));
    }
    return labels;
  }

  /** @param {number} number */
  label(number) {
    const { node, silence_ms: silence } = this.parts[number];
    const said = milliseconds(silence);
    const text = said ? `${node}, ${said}` : node;
    return make("span", { className: `chip c${colourOf(node)}`, textContent: text, title: number ? "the answer goes on here" : "the node that answers" });
  }

  /** Returns a text in the colour of its part, behind the labels of what begins with it. @param {string} text @returns {Node[]} */
  text(text) {
    if (this.first < 0) return [document.createTextNode(text)];
    const labels = text.trim() ? this.labels() : [];
    if (!this.parts[this.part]) return [document.createTextNode(text)];
    return [...labels, make("span", { className: `part c${colourOf(this.parts[this.part].node)}`, textContent: text })];
  }

  /** @param {Tree[]} tree @returns {Node[]} */
  nodes(tree) {
    return tree.flatMap((each) => (typeof each === "string" ? this.text(each) : this.element(each)));
  }

  /**
   * Returns a heading behind the labels at its beginning. No level is left out, whatever the model wrote.
   * @param {number} level
   * @param {Node[]} inside
   */
  heading(level, inside) {
    this.level = Math.min(6, level + 2, this.level + 1);
    const first = inside.findIndex((each) => !(each instanceof Element && each.classList.contains("chip")));
    const at = first < 0 ? inside.length : first;
    return [...inside.slice(0, at), make(HEADINGS[this.level - 3], {}, ...inside.slice(at))];
  }

  /** @param {[string, number | string | null, Tree[]]} element @returns {Node[]} */
  element([kind, attr, children]) {
    if (kind === "seam") {
      this.goal = Math.max(this.goal, this.first + Number(attr) + 1);
      return [];
    }
    const inside = this.nodes(children);
    if (SIMPLE[kind]) return [make(SIMPLE[kind], {}, ...inside)];
    switch (kind) {
      case "h":
        return this.heading(Number(attr), inside);
      case "ol":
        return [make("ol", attr === null ? {} : { start: attr }, ...inside)];
      case "pre":
        return [make("pre", { tabIndex: 0, "aria-label": attr ? `code, ${attr}` : "code" }, make("code", {}, ...inside))];
      case "code":
        return [make("code", {}, ...inside)];
      case "a":
      case "img":
        return link(kind, String(attr), inside);
      case "table":
        return [make("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel: "table" }, make("table", {}, make("tbody", {}, ...inside)))];
      case "th":
      case "td":
        return [make(kind, { className: SIDES.has(String(attr)) ? attr : "" }, ...inside)];
      case "plain":
        return [make("p", { className: "plain" }, ...inside)];
    }
    return inside;
  }
}

/**
 * Returns a link with its host beside it. An image is a link too: loading it would tell its host what was answered.
 * @param {string} kind
 * @param {string} address
 * @param {Node[]} inside
 */
function link(kind, address, inside) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return inside;
  }
  if (!SCHEMES.has(url.protocol)) return inside;
  const made = make("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank" }, ...inside);
  const host = url.protocol === "mailto:" ? "mail" : url.host;
  return [made, make("span", { className: "host", textContent: kind === "img" ? ` (image at ${host})` : ` (${host})` })];
}
