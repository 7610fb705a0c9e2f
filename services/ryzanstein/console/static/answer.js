// One answer: closed blocks, which never change again, and the block that still grows with its tail.

import { fill, make, say, setText } from "./dom.js";
import { OVER, SAID } from "./states.js";
import { Painter, milliseconds } from "./tree.js";

const TAKES_TEXT = new Set(["P", "UL", "OL", "LI", "BLOCKQUOTE", "H3", "H4", "H5", "H6", "PRE"]);
const SENTENCE = /[.!?:](?=\s)|\n/g;

export class Answer {
  constructor(id) {
    this.id = id;
    this.version = 0;
    this.status = "waiting";
    this.painter = new Painter();
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

  /** Takes a frame: what is new behind `version`. */
  apply(frame) {
    if (frame.version <= this.version) return;
    this.version = frame.version;
    if (frame.parts) this.painter.parts = frame.parts;
    if (frame.reasoning) this.aside("reasoning", "Reasoning", frame.reasoning);
    if (frame.calls) this.aside("calls", "Calls of tools", frame.calls);
    if (frame.blocks) this.close(frame.blocks);
    if (frame.open) this.replaceOpen(frame.open);
    if (frame.tail) this.append(frame.tail);
    this.element.classList.toggle("moved", this.painter.parts.length > 1);
    this.report(frame);
  }

  close(blocks) {
    this.rewind();
    this.painter.goal = 0;
    for (const block of blocks) {
      const made = make("div", { className: "block" }, this.painter.block(block));
      this.closed.append(made);
      this.speak(textOf(made), true);
    }
    this.atOpen = this.painter.part;
    this.open.replaceChildren();
    this.tail = null;
  }

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
    if (this.atOpen !== undefined) this.painter.part = this.atOpen;
  }

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
    let at = this.open;
    while (at.lastElementChild && TAKES_TEXT.has(at.lastElementChild.tagName)) at = at.lastElementChild;
    if (at.tagName === "PRE") at = at.firstElementChild;
    if (at === this.open) at = this.open.appendChild(make("p"));
    return at.appendChild(make("span", { className: "tail" }));
  }

  aside(kind, title, text) {
    if (!this[kind]) {
      this[kind] = make("pre");
      const box = make("details", { className: `aside ${kind}`, open: kind === "calls" }, make("summary", { textContent: title }), this[kind]);
      this.element.insertBefore(box, this.body);
    }
    this[kind].append(text);
  }

  report(frame) {
    const before = this.status;
    this.status = frame.status;
    this.element.classList.toggle("streaming", !this.over);
    setText(this.state, SAID[frame.status] ?? frame.status);
    this.state.className = frame.status === "failed" || frame.status === "lost" ? "failed" : "";
    setText(this.figures, frame.figures ?? "");
    setText(this.note, frame.note ?? "");
    this.showParts(frame.tokens ?? 0);
    if (this.over && before !== this.status) {
      this.speak(textOf(this.open), true);
      say(`Answer ${SAID[this.status] || "complete"}. ${frame.note ?? ""}`);
    }
  }

  showParts(tokens) {
    const parts = this.painter.parts;
    if (!parts.length) return;
    const before = parts.slice(0, -1).reduce((sum, part) => sum + (part.tokens ?? 0), 0);
    const count = (part, at) => (at === parts.length - 1 ? tokens - before : part.tokens ?? 0);
    setText(this.tokens, `${tokens} tokens, ${parts.length === 1 ? "1 part" : `${parts.length} parts`}`);
    this.partsBox.hidden = false;
    fill(this.table, ["node", "tokens", "silence before", "cause"],
      parts.map((part, at) => [part.node, count(part, at), milliseconds(part.silence_ms), part.cause ?? ""]));
  }

  /** Lets whole sentences be said, each once. */
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

/** Returns the text of what a model said: without labels and hosts, which are ours. */
export function textOf(element) {
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT, (node) =>
    node.classList?.contains("chip") || node.classList?.contains("host") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  let text = "";
  while (walk.nextNode()) if (walk.currentNode.nodeType === Node.TEXT_NODE) text += walk.currentNode.data;
  return text;
}

/** Returns an answer of which the cluster has the text alone. */
export function uncoloured(blocks) {
  const painter = new Painter();
  const made = blocks.map((block) => make("div", { className: "block" }, painter.block(block)));
  const foot = make("div", { className: "foot" }, make("span", { textContent: "an earlier answer: who wrote it is not known any more" }));
  return make("article", { className: "answer uncoloured", "aria-label": "Earlier answer" }, make("div", { className: "body" }, ...made), foot);
}
