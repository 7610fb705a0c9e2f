// Makes elements of an answer's tree: [kind, attr, children], where a child is a text or such an array.

import { make } from "./dom.js";

const SIMPLE = { p: "p", ul: "ul", li: "li", quote: "blockquote", em: "em", strong: "strong", del: "del", br: "br", hr: "hr", tr: "tr" };
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const SIDES = new Set(["left", "right", "center"]);
const colours = new Map();

/** Returns the number of a node's colour: by its first appearance on this page. */
export function colourOf(node) {
  if (!colours.has(node)) colours.set(node, colours.size % 8);
  return colours.get(node);
}

export const milliseconds = (ms) => (ms === null || ms === undefined ? "" : `${Math.round(ms)} ms`);

/** Writes the parts of one answer in the colours of their nodes. It goes through the text from the beginning to the end. */
export class Painter {
  constructor() {
    this.parts = [];
    this.part = -1; // the last one that has its label
    this.goal = 0; // the one that writes the next text
    this.first = 0; // that of the block's beginning
  }

  /** Begins a block whose first text belongs to this part. Returns its elements. */
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

  label(number) {
    const { node, silence_ms: silence } = this.parts[number];
    const said = milliseconds(silence);
    const text = said ? `${node}, ${said}` : node;
    return make("span", { className: `chip c${colourOf(node)}`, textContent: text, title: number ? "the answer goes on here" : "the node that answers" });
  }

  /** Returns a text in the colour of its part, behind the labels of what begins with it. */
  text(text) {
    if (this.first < 0) return [document.createTextNode(text)];
    const labels = text.trim() ? this.labels() : [];
    if (!this.parts[this.part]) return [document.createTextNode(text)];
    return [...labels, make("span", { className: `part c${colourOf(this.parts[this.part].node)}`, textContent: text })];
  }

  nodes(tree) {
    return tree.flatMap((each) => (typeof each === "string" ? this.text(each) : this.element(each)));
  }

  element([kind, attr, children]) {
    if (kind === "seam") {
      this.goal = Math.max(this.goal, this.first + attr + 1);
      return [];
    }
    const inside = this.nodes(children);
    if (SIMPLE[kind]) return [make(SIMPLE[kind], {}, ...inside)];
    switch (kind) {
      case "h":
        return [make(`h${Math.min(6, attr + 2)}`, {}, ...inside)];
      case "ol":
        return [make("ol", attr === null ? {} : { start: attr }, ...inside)];
      case "pre":
        return [make("pre", { tabIndex: 0, "aria-label": attr ? `code, ${attr}` : "code" }, make("code", {}, ...inside))];
      case "code":
        return [make("code", {}, ...inside)];
      case "a":
      case "img":
        return link(kind, attr, inside);
      case "table":
        return [make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "table" }, make("table", {}, make("tbody", {}, ...inside)))];
      case "th":
      case "td":
        return [make(kind, { className: SIDES.has(attr) ? attr : "" }, ...inside)];
      case "plain":
        return [make("p", { className: "plain" }, ...inside)];
    }
    return inside;
  }
}

/** Returns a link with its host beside it. An image is a link too: loading it would tell its host what was answered. */
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
