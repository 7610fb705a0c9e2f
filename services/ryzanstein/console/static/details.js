// The page of one answer: who wrote which part, and when its tokens came.

import { figure } from "./chart.js";
import { byId, fill, make, setText, the } from "./dom.js";
import { SAID, OVER } from "./states.js";
import { colourOf, milliseconds } from "./tree.js";

const LOOK_MS = 1000;

/**
 * @typedef {import("./wire.js").Details} Details
 * @typedef {import("./wire.js").Part} Part
 * @typedef {{first: number, from: number, to: number}} Span What a part has of the answer: its first token, and when it was written.
 */

export class DetailsPage {
  /** @param {import("./socket.js").Socket} socket */
  constructor(socket) {
    this.socket = socket;
    this.answer = "";
    this.over = false;
    setInterval(() => this.look(), LOOK_MS);
  }

  /** Shows an answer; an empty id leaves the page. @param {string} answer */
  show(answer) {
    if (answer === this.answer) return;
    this.answer = answer;
    this.over = false;
    byId("answer-facts").replaceChildren();
    byId("answer-timeline").replaceChildren();
    byId("answer-parts").replaceChildren();
    setText(byId("answer-note"), answer ? "asking" : "");
    this.look();
  }

  welcome() {
    this.over = false;
    this.look();
  }

  look() {
    if (!this.answer || this.over || !this.socket.ready || document.hidden) return;
    this.socket.call({ t: "details", answer: this.answer }).catch((error) => {
      this.over = true;
      setText(byId("answer-note"), error.message);
    });
  }

  /** @param {Details} told */
  details(told) {
    if (told.id !== this.answer) return;
    this.over = OVER.has(told.status);
    const parts = told.parts ?? [];
    const spans = spansOf(told);
    const notes = [told.note ?? "", told.resumed ? "The console was restarted during this answer: the times are those of reading it again. Silences are the router's own." : ""];
    setText(byId("answer-note"), notes.filter(Boolean).join(" "));
    const tokens = parts.reduce((sum, part) => sum + (part.tokens ?? 0), 0);
    const link = make("a", { href: `#s/${encodeURIComponent(told.session)}`, textContent: told.question || told.session });
    /** @type {[string, string | Node][]} */
    const facts = [
      ["question", link], ["state", SAID[told.status] || told.status], ["asked", new Date(told.asked_at * 1000).toLocaleString()],
      ["model", told.model ?? ""], ["tokens", `${tokens}, after ${told.prompt_tokens ?? 0} of the prompt`],
      ["speed", told.figures ?? ""], ["generation", told.generation ?? ""],
    ];
    byId("answer-facts").replaceChildren(...facts.filter(([, fact]) => fact).flatMap(([name, fact]) => [
      make("dt", { textContent: name }), make("dd", {}, fact)]));
    fill(the("table", "answer-parts"), ["node", "first token", "tokens", "written in", "tokens/s", "silence before", "cause"],
      parts.map((part, at) => row(part, spans[at])));
    if (spans.length) byId("answer-timeline").replaceChildren(timeline(told, parts, spans, tokens));
  }
}

/**
 * @param {Part} part
 * @param {Span | undefined} span
 */
function row(part, span) {
  const tokens = part.tokens ?? 0;
  const took = span ? span.to - span.from : 0;
  return [part.node, span?.first ?? "", tokens, span ? `${seconds(span.from)} to ${seconds(span.to)}` : "",
    took > 0 && tokens > 1 ? ((tokens - 1) / (took / 1000)).toFixed(0) : "", milliseconds(part.silence_ms), part.cause ?? ""];
}

/** @param {number} ms */
const seconds = (ms) => `${(ms / 1000).toFixed(ms < 1e4 ? 2 : 1)} s`;

/** Returns what each part has of the timeline. @param {Details} told */
function spansOf(told) {
  /** @type {Span[]} */
  const spans = [];
  let count = 0;
  for (const [at, part, tokens] of told.timeline ?? []) {
    spans[part] ??= { first: count, from: at, to: at };
    spans[part].to = at;
    count += tokens;
  }
  return spans;
}

/**
 * @param {Details} told
 * @param {Part[]} parts
 * @param {Span[]} spans
 * @param {number} tokens
 */
function timeline(told, parts, spans, tokens) {
  /** @type {import("./chart.js").Line[]} */
  const lines = [];
  let count = 0;
  for (const [at, part, more] of told.timeline ?? []) {
    const node = parts[part]?.node ?? "";
    const last = lines.at(-1);
    const line = last && last.name === node ? last : { name: node, colour: colourOf(node), steps: true, dots: [] };
    if (line !== last) lines.push(line);
    count += more;
    line.dots.push([at, count]);
  }
  const end = Math.max(1, ...spans.filter(Boolean).map((span) => span.to));
  const bands = parts.flatMap((part, at) => {
    const before = spans[at - 1];
    const span = spans[at];
    if (!before || !span) return [];
    const silence = milliseconds(part.silence_ms);
    // The router saw when the tokens came from the nodes; what it sends arrives together.
    const from = silence ? Math.max(0, span.from - (part.silence_ms ?? 0)) : before.to;
    return [{ from, to: span.from, label: silence ? `${silence} of silence` : "moved" }];
  });
  const moves = bands.length ? `${bands.length} ${bands.length === 1 ? "move" : "moves"}: ${bands.map((band) => band.label).join(", ")}` : "no move";
  return figure({
    title: "Tokens", unit: "since the question", from: 0, to: end, lines, bands,
    ticks: [[0, "0 s"], [end / 2, seconds(end / 2)], [end, seconds(end)]],
    said: `${tokens} tokens in ${seconds(end)}, ${moves}. The table below says the same.`,
  });
}
