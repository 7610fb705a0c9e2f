// One answer: closed blocks, which never change again, and the block that still grows with its tail.

import { fill, make, say, setText } from "./dom.js";
import { OVER, SAID } from "./states.js";
import { callsOf } from "./tools.js";
import { Painter, milliseconds } from "./tree.js";

const TAKES_TEXT = new Set(["P", "UL", "OL", "LI", "BLOCKQUOTE", "H3", "H4", "H5", "H6", "PRE"]);
const SENTENCE = /[.!?:](?=\s)|\n/g;

/** @typedef {import("./wire.js").Block} Block */

export class Answer {
  /**
   * @param {string} id
   * @param {(results: {id: string, name: string, content: string}[]) => void} onResults
   */
  constructor(id, onResults) {
    this.id = id;
    this.onResults = onResults;
    /** @type {import("./wire.js").Call[] | null} */
    this.asked = null;
    /** @type {HTMLElement | null} */
    this.form = null;
    this.version = 0;
    this.status = "waiting";
    this.painter = new Painter();
    /** @type {Record<string, HTMLElement>} */
    this.asides = {};
    /** @type {HTMLElement | null} */
    this.tail = null;
    this.atOpen = -1;
    this.levelAtOpen = 2;
    this.toldEnd = false;
    this.spoken = 0; // characters of the open block that were said
    this.closed = make("div");
    this.open = make("div");
    this.body = make("div", { className: "body" }, this.closed, this.open);
    this.state = make("span", { textContent: SAID.waiting });
    this.figures = make("span");
    this.note = make("span");
    this.table = make("table", { className: "parts" });
    this.tokens = make("summary");
    this.partsBox = make("details", { hidden: true }, this.tokens, make("div", { className: "scroll" }, this.table));
    const when = make("a", { href: `#answer/${encodeURIComponent(id)}`, textContent: "timeline" });
    this.foot = make("div", { className: "foot" }, this.state, this.figures, this.note, this.partsBox, when);
    this.element = make("article", { className: "answer streaming", "aria-label": "Answer" }, this.body, this.foot);
  }

  get over() {
    return OVER.has(this.status);
  }

  /** Takes a frame: what is new behind `version`. @param {import("./wire.js").Frame} frame */
  apply(frame) {
    if (frame.version <= this.version) return;
    this.version = frame.version;
    if (frame.parts) this.painter.parts = frame.parts;
    if (frame.reasoning) this.aside("reasoning", "Reasoning", frame.reasoning);
    if (frame.calls) this.aside("calls", "Calls of tools", frame.calls);
    if (frame.blocks) this.close(frame.blocks);
    if (frame.open) this.replaceOpen(frame.open);
    if (frame.tail) this.append(frame.tail);
    if (frame.asked) this.ask(frame.asked);
    this.element.classList.toggle("moved", this.painter.parts.length > 1);
    this.report(frame);
  }

  /** @param {Block[]} blocks */
  close(blocks) {
    this.rewind();
    this.painter.goal = 0;
    for (const block of blocks) {
      const made = make("div", { className: "block" }, this.painter.block(block));
      this.closed.append(made);
      this.speak(textOf(made), true);
    }
    this.atOpen = this.painter.part;
    this.levelAtOpen = this.painter.level;
    this.open.replaceChildren();
    this.tail = null;
  }

  /** @param {Block} block */
  replaceOpen(block) {
    this.rewind();
    this.painter.goal = 0;
    this.atOpen = this.painter.part;
    this.open.replaceChildren(this.painter.block(block));
    this.tail = null;
    this.speak(textOf(this.open), false);
  }

  /** The open block is painted again: its labels are not there any more. */
  rewind() {
    this.painter.part = this.atOpen;
    this.painter.level = this.levelAtOpen;
  }

  /** @param {[number, string][]} texts */
  append(texts) {
    for (const [part, text] of texts) {
      this.tail ??= this.newTail();
      this.painter.first = part;
      this.painter.goal = Math.max(this.painter.goal, part);
      this.tail.append(...this.painter.text(text));
    }
  }

  /** Returns where text goes that is not laid out yet: into the last paragraph, item or code, as it will most likely be. */
  newTail() {
    /** @type {Element} */
    let at = this.open;
    while (at.lastElementChild && TAKES_TEXT.has(at.lastElementChild.tagName)) at = at.lastElementChild;
    if (at.tagName === "PRE") at = at.firstElementChild ?? at;
    if (at === this.open) at = this.open.appendChild(make("p"));
    return at.appendChild(make("span", { className: "tail" }));
  }

  /** Shows the calls with which the answer ended, in place of how they were written. @param {import("./wire.js").Call[]} calls */
  ask(calls) {
    if (this.asked) return;
    this.asides.calls?.closest("details")?.remove();
    this.asked = calls;
    this.form = callsOf(calls, (results) => this.onResults(results));
    this.foot.before(this.form);
    say(`The assistant calls ${calls.map((call) => call.name).join(" and ")}.`);
  }

  /** The conversation goes on: nobody waits for results here any more. */
  settle() {
    if (!this.form || !this.asked) return;
    const settled = callsOf(this.asked, null);
    this.form.replaceWith(settled);
    this.form = null;
  }

  /**
   * @param {string} kind
   * @param {string} title
   * @param {string} text
   */
  aside(kind, title, text) {
    if (!this.asides[kind]) {
      this.asides[kind] = make("pre");
      const box = make("details", { className: `aside ${kind}`, open: kind === "calls" }, make("summary", { textContent: title }), this.asides[kind]);
      this.element.insertBefore(box, this.body);
    }
    this.asides[kind].append(text);
  }

  /** @param {import("./wire.js").Frame} frame */
  report(frame) {
    this.status = frame.status;
    this.element.classList.toggle("streaming", !this.over);
    setText(this.state, SAID[frame.status] ?? frame.status);
    this.state.className = frame.status === "failed" || frame.status === "lost" ? "failed" : "";
    setText(this.figures, frame.figures ?? "");
    setText(this.note, frame.note ?? "");
    this.showParts(frame.tokens ?? 0);
    if (this.over && !this.toldEnd && !this.open.firstChild) { // what is still open comes once more, as it is read
      this.toldEnd = true;
      say(`Answer ${SAID[this.status] || "complete"}. ${frame.note ?? ""}`);
    }
  }

  /** @param {number} tokens */
  showParts(tokens) {
    const parts = this.painter.parts;
    if (!parts.length) return;
    const before = parts.slice(0, -1).reduce((sum, part) => sum + (part.tokens ?? 0), 0);
    const count = (/** @type {import("./wire.js").Part} */ part, /** @type {number} */ at) => (at === parts.length - 1 ? tokens - before : part.tokens ?? 0);
    setText(this.tokens, `${tokens} tokens, ${parts.length === 1 ? "1 part" : `${parts.length} parts`}`);
    this.partsBox.hidden = false;
    fill(this.table, ["node", "tokens", "silence before", "cause"],
      parts.map((part, at) => [part.node, count(part, at), milliseconds(part.silence_ms), part.cause ?? ""]));
  }

  /** Lets whole sentences be said, each once. @param {string} text @param {boolean} whole */
  speak(text, whole) {
    if (whole) {
      say(text.slice(this.spoken));
      this.spoken = 0;
      return;
    }
    let end = this.spoken;
    for (const found of text.matchAll(SENTENCE)) end = Math.max(end, found.index + 1);
    say(text.slice(this.spoken, end));
    this.spoken = end;
  }
}

/** Returns the text of what a model said: without labels and hosts, which are ours. @param {Element} element */
export function textOf(element) {
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT, (node) =>
    node instanceof Element && (node.classList.contains("chip") || node.classList.contains("host")) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  let text = "";
  while (walk.nextNode()) if (walk.currentNode instanceof Text) text += walk.currentNode.data;
  return text;
}

/**
 * Returns an answer of which the cluster has the text alone.
 * @param {Block[]} blocks
 * @param {import("./wire.js").Call[]} asked
 */
export function uncoloured(blocks, asked = []) {
  const painter = new Painter();
  const made = blocks.map((block) => make("div", { className: "block" }, painter.block(block)));
  const foot = make("div", { className: "foot" }, make("span", { textContent: "an earlier answer: who wrote it is not known any more" }));
  return make("article", { className: "answer uncoloured", "aria-label": "Earlier answer" }, make("div", { className: "body" }, ...made), ...(asked.length ? [callsOf(asked, null)] : []), foot);
}
